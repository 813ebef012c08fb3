//! Writes `llama.bpk` and `llama-f16.bpk`: a small model from a safetensors file with the names and
//! layouts of Hugging Face, as Burn keeps it. Written with burn and burn-store 0.21.0, rustc 1.95.0:
//!
//! ```toml
//! burn = { version = "0.21", default-features = false, features = ["std", "ndarray"] }
//! burn-store = { version = "0.21", default-features = false, features = ["std", "burnpack", "safetensors"] }
//! ```
//!
//! `python -m tests.stats.burn.llama FOLDER` writes the safetensors file; then `cargo run FOLDER`.

use burn::backend::NdArray;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::backend::Backend;
use burn_store::{
    BurnpackStore, HalfPrecisionAdapter, ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore,
};

#[derive(Module, Debug)]
struct Attention<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    o_proj: Linear<B>,
}

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    gate_proj: Linear<B>,
    up_proj: Linear<B>,
    down_proj: Linear<B>,
}

#[derive(Module, Debug)]
struct Layer<B: Backend> {
    self_attn: Attention<B>,
    mlp: Mlp<B>,
    input_layernorm: RmsNorm<B>,
    post_attention_layernorm: RmsNorm<B>,
}

#[derive(Module, Debug)]
struct Body<B: Backend> {
    embed_tokens: Embedding<B>,
    layers: Vec<Layer<B>>,
    norm: RmsNorm<B>,
}

#[derive(Module, Debug)]
struct Llama<B: Backend> {
    model: Body<B>,
    lm_head: Linear<B>,
}

const WIDTH: usize = 16;
const INNER: usize = 40;
const KEYS: usize = 8;
const WORDS: usize = 48;

fn llama<B: Backend>(device: &B::Device) -> Llama<B> {
    let linear = |i, o| LinearConfig::new(i, o).with_bias(false).init(device);
    let norm = || RmsNormConfig::new(WIDTH).init(device);
    Llama {
        model: Body {
            embed_tokens: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            layers: (0..2)
                .map(|_| Layer {
                    self_attn: Attention {
                        q_proj: linear(WIDTH, WIDTH),
                        k_proj: linear(WIDTH, KEYS),
                        v_proj: linear(WIDTH, KEYS),
                        o_proj: linear(WIDTH, WIDTH),
                    },
                    mlp: Mlp {
                        gate_proj: linear(WIDTH, INNER),
                        up_proj: linear(WIDTH, INNER),
                        down_proj: linear(INNER, WIDTH),
                    },
                    input_layernorm: norm(),
                    post_attention_layernorm: norm(),
                })
                .collect(),
            norm: norm(),
        },
        lm_head: linear(WIDTH, WORDS),
    }
}

fn main() {
    let folder = std::env::args().nth(1).expect("a folder with llama.safetensors");
    let device = Default::default();
    let mut model = llama::<NdArray>(&device);
    let mut source = SafetensorsStore::from_file(format!("{folder}/llama.safetensors"))
        .with_key_remapping(r"norm\.weight$", "norm.gamma")
        .with_from_adapter(PyTorchToBurnAdapter);
    let applied = model.load_from(&mut source).expect("the safetensors file");
    println!("{applied}");
    assert!(applied.missing.is_empty() && applied.unused.is_empty() && applied.errors.is_empty());
    let mut pack = BurnpackStore::from_file(format!("{folder}/llama.bpk")).overwrite(true);
    model.save_into(&mut pack).expect("a Burnpack file");
    let mut half = BurnpackStore::from_file(format!("{folder}/llama-f16.bpk"))
        .overwrite(true)
        .with_to_adapter(HalfPrecisionAdapter::new());
    model.save_into(&mut half).expect("a Burnpack file");
}
