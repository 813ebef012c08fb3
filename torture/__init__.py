"""What the package promises about files, tried with damaged files, lying servers and kills."""
