// The explorer of tensors: search, filter, sort, tree, statistics of the one that is selected.
//
// Rows come from Python once, as columns of bytes; searching, filtering and sorting happen here,
// and only what must be read from the file is asked for. Whatever comes from a file is shown with
// textContent alone.

const ROW_HEIGHT = 24; // pixels, as in explorer.css
const PADDING = 12; // of rows, pixels, as there
const [FEWEST_ROWS, MOST_ROWS] = [5, 13]; // to be seen at a time
const MOST_PIXELS = 8e6; // browsers do not make elements that are much higher
const FEW_MATCHES = 300; // a tree of so few is shown open
const SETTLING = 150; // milliseconds after which a selection is no passing by
const REFRESHING = 500; // milliseconds between two sorts while statistics come in
const MOST_KINDS = 40;
const TWISTY = 16; // pixels, of what opens a module
const INDENT = 14; // pixels, of each level of the tree
const NARROWEST_NAME = 96; // pixels
const LEAST_ELSE = 180; // pixels, of all other columns
const STEP = 24; // pixels that a key moves the edge of a column
// What is true of codes as it is of weights.
const OF_CODES = ["count", "nan", "inf", "zero", "unique"];
const BADGES = { nan: "NaN", inf: "∞", all_zero: "all zero", dead_rows: "dead rows" };
const DEEPEST = 64; // modules in modules; a name may have any number of dots
const SVG = "http://www.w3.org/2000/svg";

// --- text ----------------------------------------------------------------------------------------

const UNPRINTABLE = /[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu;
const SHORT_ESCAPES = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** Escape control, bidirectional and other invisible characters, as Python's repr does. */
export function printable(text) {
  return text.replace(UNPRINTABLE, (character) => {
    const code = character.codePointAt(0).toString(16);
    if (character in SHORT_ESCAPES) return SHORT_ESCAPES[character];
    if (code.length <= 2) return `\\x${code.padStart(2, "0")}`;
    return code.length <= 4 ? `\\u${code.padStart(4, "0")}` : `\\U${code.padStart(8, "0")}`;
  });
}

/** Replace the middle of a text that is too long: the end of a tensor's name tells most. */
function shortened(text, width) {
  if (text.length <= width) return text;
  const head = Math.max(1, Math.floor(width / 3));
  const tail = Math.max(1, width - 1 - head);
  return `${text.slice(0, head)}…${text.slice(-tail)}`;
}

const WORDS = /(?<=[./])/; // each with the separator behind it
const INDEX = /(?:^|[_-]|^h)\d+$/;

/**
 * Leave out words at the beginning of a name until it fits, and never a number: of many layers it
 * says which one a row is of. The last word stays, too.
 */
export function elided(name, width, prefix = 0) {
  const parts = name.split(WORDS);
  const left = parts.map(() => false);
  let length = name.length;
  let start = 0;
  for (let n = 0; n < parts.length - 1; n += 1) {
    start += parts[n].length;
    if (start > prefix && length <= width) break;
    if (INDEX.test(parts[n].slice(0, -1))) continue;
    left[n] = true;
    length += (left[n - 1] ? 0 : 1) - parts[n].length;
  }
  const last = parts.pop();
  parts.push(length > width ? shortened(last, Math.max(8, last.length + width - length)) : last);
  return parts.map((part, n) => (left[n] ? (left[n - 1] ? "" : "…") : part)).join("");
}

/** Count the characters of the words that names begin with, up to a number. */
export function sharedPrefix(names) {
  if (names.length < 2) return 0;
  let shared = names[0].split(WORDS).slice(0, -1);
  const number = shared.findIndex((part) => INDEX.test(part.slice(0, -1)));
  if (number >= 0) shared = shared.slice(0, number);
  let text = shared.join("");
  for (const name of names) {
    while (text && !name.startsWith(text)) {
      shared.pop();
      text = shared.join("");
    }
    if (!text) break;
  }
  return text.length;
}

const grouped = new Intl.NumberFormat("en-US");

function binarySize(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let at = 0;
  let value = nbytes;
  for (; value >= 1023.95 && at < units.length - 1; at += 1) value /= 1024;
  return at ? `${value.toFixed(1)} ${units[at]}` : `${value} B`;
}

/** Write a statistic with four significant digits, whole numbers whole. */
function figure(value) {
  if (Number.isNaN(value)) return "–";
  if (value === 0) return "0"; // also where it is negative
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e12) return grouped.format(value).replace("-", "−");
  const plain = size < 1e6 && size >= 1e-4;
  const text = plain ? String(Number(value.toPrecision(4))) : value.toExponential(3);
  return text.replace(/-/g, "−").replace("e+", "e");
}

// --- search: the globs of Python's fnmatch, with case --------------------------------------------

const WILDCARD = /[*?[]/;

/** Make a predicate of names: a glob of the whole name, or a word anywhere in it. */
export function matcher(query) {
  if (!query) return () => true;
  if (!WILDCARD.test(query)) return (name) => name.includes(query);
  const pattern = globPattern(query);
  return (name) => pattern.test(name);
}

function globPattern(glob) {
  const pieces = [[]]; // of what stands between asterisks
  const characters = Array.from(glob);
  for (let at = 0; at < characters.length; at += 1) {
    const character = characters[at];
    const close = character === "[" ? classEnd(characters, at + 1) : -1;
    if (character === "*") {
      pieces.push([]);
    } else if (close > 0) {
      pieces.at(-1).push(characterClass(characters.slice(at + 1, close)));
      at = close;
    } else {
      pieces.at(-1).push(character === "?" ? "." : escaped(character));
    }
  }
  const [first, ...others] = pieces.map((piece) => piece.join(""));
  const last = others.pop();
  if (last === undefined) return new RegExp(`^${first}$`, "su");
  // What follows an asterisk is taken where it comes first and never again: without this the time
  // would grow with the power of the number of asterisks.
  const middle = others.filter(Boolean).map((piece, n) => `(?=(?<p${n}>.*?${piece}))\\k<p${n}>`);
  return new RegExp(`^${first}${middle.join("")}.*${last}$`, "su");
}

function escaped(character) {
  return /[\^$\\.*+?()[\]{}|/]/.test(character) ? `\\${character}` : character;
}

/** Find the bracket that closes a class; one right at its beginning is a member. */
function classEnd(characters, start) {
  const first = characters[start] === "!" ? start + 1 : start;
  return characters.indexOf("]", characters[first] === "]" ? first + 1 : first);
}

function characterClass(characters) {
  const negated = characters[0] === "!";
  const members = negated ? characters.slice(1) : characters;
  const ranges = [];
  for (let at = 0; at < members.length; at += 1) {
    const isRange = members[at + 1] === "-" && at + 2 < members.length;
    const [low, high] = [members[at], isRange ? members[at + 2] : members[at]];
    // A range from a later to an earlier character has no members.
    if (low.codePointAt(0) <= high.codePointAt(0)) ranges.push(hex(low) + "-" + hex(high));
    if (isRange) at += 2;
  }
  if (!ranges.length) return negated ? "." : "(?!)";
  return `[${negated ? "^" : ""}${ranges.join("")}]`;
}

function hex(character) {
  return `\\u{${character.codePointAt(0).toString(16)}}`;
}

// --- the columns that Python sends ---------------------------------------------------------------

function numbers(Kind, view) {
  // A view may begin anywhere in a message, and typed arrays only at multiples of their size.
  return new Kind(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

export class Tensors {
  constructor(model) {
    const lengths = numbers(Uint32Array, model.get("_lengths"));
    const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(model.get("_names"));
    let at = 0;
    this.names = Array.from(lengths, (length) => text.slice(at, (at += length)));
    this.count = this.names.length;
    this.kind = numbers(Uint32Array, model.get("_kind"));
    this.kinds = model.get("_kinds");
    this.colors = model.get("_colors");
    this.shape = numbers(Uint32Array, model.get("_shape"));
    this.shapes = model.get("_shapes");
    this.nbytes = numbers(Float64Array, model.get("_nbytes"));
    this.codes = numbers(Uint8Array, model.get("_codes"));
    this.statistics = model.get("_statistics");
    this.found = new Map(); // what is wrong with a row: [badge, severity, what it says]
    this.known = new Uint8Array(this.count);
    this.values = null;
  }

  /** Take statistics of some rows, one row of numbers each. */
  receive(rows, values) {
    const width = this.statistics.length;
    this.values ??= new Float64Array(this.count * width).fill(NaN);
    rows.forEach((row, n) => {
      this.values.set(values.subarray(n * width, (n + 1) * width), row * width);
      this.known[row] = 1;
    });
  }

  /** Note that something is wrong with a row. */
  mark(row, badge, severity, text) {
    const marks = this.found.get(row) ?? [];
    if (!marks.some((mark) => mark[2] === text)) this.found.set(row, [...marks, [badge, severity, text]]);
  }

  /** Tell whether a statistic of a row is that of codes, which says nothing of the weights. */
  isOfCodes(row, number) {
    return this.codes[row] === 1 && !OF_CODES.includes(this.statistics[number]);
  }

  statistic(row, number) {
    return this.values === null ? NaN : this.values[row * this.statistics.length + number];
  }

  /** Sort all rows. What is not known comes last, equals stay in the order of the file. */
  sorted(by, descending) {
    const order = Uint32Array.from({ length: this.count }, (_, row) => row);
    if (by === "file") return descending ? order.reverse() : order;
    if (by === "name") {
      this.keys ??= this.names.map((name) => name.replace(/\d+/g, (n) => n.padStart(12, "0")));
      const keys = this.keys;
      order.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
      return descending ? order.reverse() : order;
    }
    const column = by === "size" ? this.nbytes : this.column(this.statistics.indexOf(by));
    const sign = descending ? -1 : 1;
    return order.sort((a, b) => {
      const [left, right] = [column[a], column[b]];
      if (left !== left || right !== right) return (left !== left) - (right !== right) || a - b;
      return left === right ? a - b : left < right ? -sign : sign;
    });
  }

  column(number) {
    const value = (_, row) => (this.isOfCodes(row, number) ? NaN : this.statistic(row, number));
    return Float64Array.from({ length: this.count }, value);
  }
}

// --- the tree of modules -------------------------------------------------------------------------

class Tree {
  constructor(names) {
    this.parents = [-1];
    this.labels = [""];
    this.children = [[]];
    this.rows = [[]];
    this.home = new Int32Array(names.length); // the module of each row
    const known = [new Map()];
    names.forEach((name, row) => {
      const parts = name.split(WORDS);
      if (!/[./]$/.test(name)) parts.pop();
      let node = 0;
      for (const part of parts.slice(0, DEEPEST)) {
        let child = known[node].get(part);
        if (child === undefined) {
          child = this.parents.push(node) - 1;
          this.labels.push(part);
          this.children.push([]);
          this.rows.push([]);
          known.push(new Map());
          known[node].set(part, child);
          this.children[node].push(child);
        }
        node = child;
      }
      this.home[row] = node;
      this.rows[node].push(row);
    });
    this.expanded = new Set();
    this.closed = new Set(); // where everything is shown open
    this.open = false;
  }

  /** List what is to be seen of some rows: modules as -1 - number, with the depth of each. */
  visible(matching, nbytes) {
    const size = this.parents.length;
    this.counts = new Uint32Array(size);
    this.nbytes = new Float64Array(size);
    this.best = new Float64Array(size).fill(Infinity);
    this.rank = new Int32Array(this.home.length).fill(-1);
    matching.forEach((row, rank) => {
      this.rank[row] = rank;
      for (let node = this.home[row]; node >= 0; node = this.parents[node]) {
        this.counts[node] += 1;
        this.nbytes[node] += nbytes[row];
        if (rank < this.best[node]) this.best[node] = rank;
      }
    });
    const items = [];
    const depths = [];
    this.list(0, 0, items, depths, matching);
    return { items: Int32Array.from(items), depths };
  }

  list(node, depth, items, depths, matching) {
    const here = this.rows[node].filter((row) => this.rank[row] >= 0);
    const ranked = here.map((row) => [this.rank[row], row]);
    for (const child of this.children[node]) {
      // A module of one tensor is in the row of that.
      if (this.counts[child] === 1) ranked.push([this.best[child], matching[this.best[child]]]);
      else if (this.counts[child]) ranked.push([this.best[child], -1 - this.end(child)]);
    }
    ranked.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    for (const [, item] of ranked) {
      items.push(item);
      depths.push(depth);
      if (item < 0 && this.isOpen(-1 - item)) {
        this.list(-1 - item, depth + 1, items, depths, matching);
      }
    }
  }

  /** Follow modules of which nothing is to be seen but one module: they are shown as one. */
  end(node) {
    const next = this.children[node].find((child) => this.counts[child] === this.counts[node]);
    return next === undefined ? node : this.end(next);
  }

  label(node) {
    const parts = [this.labels[node]];
    let parent = this.parents[node];
    for (; parent > 0 && this.counts[parent] === this.counts[node]; parent = this.parents[parent]) {
      parts.unshift(this.labels[parent]);
    }
    return parts.join("").slice(0, -1);
  }

  /** Count the characters of a name that the rows above it have: its module that is open. */
  above(row) {
    let node = this.home[row];
    while (node > 0 && this.counts[node] === 1) node = this.parents[node];
    let length = 0;
    for (; node > 0; node = this.parents[node]) length += this.labels[node].length;
    return length;
  }

  isOpen(node) {
    return this.open ? !this.closed.has(node) : this.expanded.has(node);
  }

  toggle(node, open = !this.isOpen(node)) {
    const [set, add] = this.open ? [this.closed, !open] : [this.expanded, open];
    if (add) set.add(node);
    else set.delete(node);
  }

  /** Open all modules around a row. */
  reveal(row) {
    for (let node = this.home[row]; node > 0; node = this.parents[node]) this.toggle(node, true);
  }
}

// --- elements ------------------------------------------------------------------------------------

function element(tag, name = "", properties = {}) {
  const made = document.createElement(tag);
  if (name) made.className = `xckpt-${name}`;
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  return made;
}

function picture(tag, attributes = {}) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function chooser(label, options) {
  const select = element("select", "", { "aria-label": label });
  for (const [textContent, value] of options) {
    select.append(element("option", "", { textContent, value }));
  }
  return select;
}

// --- the list: as many elements as fit, whatever the number of rows ------------------------------

export class List {
  constructor(tensors, chosen, toggled) {
    this.tensors = tensors;
    this.chosen = chosen;
    this.toggled = toggled;
    this.items = new Int32Array(0);
    this.depths = null;
    this.tree = null;
    this.at = -1; // the position of the cursor
    this.statistic = -1;
    this.pool = [];
    this.id = `xckpt-${Math.random().toString(36).slice(2)}`;
    this.box = element("div", "list", { tabIndex: 0, role: "listbox", "aria-label": "Tensors" });
    this.space = element("div", "space");
    this.layer = element("div", "layer", { role: "presentation" });
    this.empty = element("div", "empty");
    this.ruler = element("span", "ruler xckpt-name", { "aria-hidden": "true" });
    this.ruler.textContent = "0".repeat(100);
    this.columns = element("div", "row xckpt-columns");
    for (const name of ["name", "shape", "kind", "size", "statistic"]) {
      this.columns.append(element("span", name, { textContent: name === "kind" ? "stored as" : name }));
    }
    this.longest = 0; // characters of the longest name
    this.shared = 0; // characters that all names begin with
    this.prefix = 0; // of these, those that are left out
    this.columns.firstChild.append(this.grip());
    this.space.append(this.layer);
    const height = Math.max(FEWEST_ROWS, Math.min(MOST_ROWS, tensors.count)) * ROW_HEIGHT;
    this.box.style.height = `${height}px`;
    this.box.append(this.space, this.empty, this.ruler);
    this.box.addEventListener("scroll", () => this.draw());
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("click", (event) => this.click(event));
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.box);
  }

  /** Make the edge of the column of names, which the mouse and the keyboard move. */
  grip() {
    const grip = element("span", "grip", { tabIndex: 0, role: "separator" });
    grip.setAttribute("aria-orientation", "vertical");
    grip.setAttribute("aria-label", "Width of the column of names");
    grip.title = "Drag to make room for names; double-click to undo";
    const width = () => this.columns.firstChild.offsetWidth;
    let from = null;
    grip.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      grip.setPointerCapture(event.pointerId);
      from = [event.clientX, width()];
    });
    grip.addEventListener("pointermove", (event) => {
      if (from !== null) this.widen(from[1] + event.clientX - from[0]);
    });
    grip.addEventListener("pointerup", () => (from = null));
    grip.addEventListener("dblclick", () => this.widen(null));
    grip.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -STEP, ArrowRight: STEP }[event.key];
      if (step === undefined && event.key !== "Escape") return;
      event.preventDefault();
      this.widen(step === undefined ? null : width() + step);
    });
    return grip;
  }

  /** Give the column of names so many pixels; null is what the others leave. */
  widen(pixels) {
    const most = this.box.clientWidth - LEAST_ELSE;
    const width = pixels === null ? null : Math.max(NARROWEST_NAME, Math.min(most, pixels));
    this.box.parentElement.classList.toggle("xckpt-widened", width !== null);
    this.box.parentElement.style.setProperty("--xckpt-name", width === null ? "" : `${width}px`);
    this.draw();
  }

  show(items, depths, tree) {
    this.items = items;
    this.depths = depths;
    this.tree = tree;
    this.box.setAttribute("role", tree ? "tree" : "listbox");
    this.space.style.height = `${Math.min(MOST_PIXELS, items.length * ROW_HEIGHT)}px`;
    this.empty.hidden = items.length > 0;
    this.draw();
  }

  /** Pixels of rows for each pixel of scrolling; more than one where there are too many rows. */
  get scale() {
    const all = this.items.length * ROW_HEIGHT - this.box.clientHeight;
    const scrolled = this.space.offsetHeight - this.box.clientHeight;
    return all > MOST_PIXELS && scrolled > 0 ? all / scrolled : 1;
  }

  draw() {
    const height = this.box.clientHeight;
    if (!height) return;
    const top = this.box.scrollTop * this.scale;
    const first = Math.max(0, Math.floor(top / ROW_HEIGHT));
    const needed = Math.min(this.items.length - first, Math.ceil(height / ROW_HEIGHT) + 1);
    while (this.pool.length < needed) this.pool.push(this.newRow());
    this.layer.style.transform = `translateY(${this.box.scrollTop - (top - first * ROW_HEIGHT)}px)`;
    this.width = this.ruler.offsetWidth / 100;
    const room = this.columns.firstChild.clientWidth / this.width;
    this.prefix = this.longest > room ? this.shared : 0;
    this.columns.style.paddingRight = `${PADDING + this.box.offsetWidth - this.box.clientWidth}px`;
    this.pool.forEach((row, n) => {
      row.box.hidden = n >= needed;
      if (n < needed) this.fill(row, first + n);
    });
    const active = this.at >= first && this.at < first + needed;
    if (active) this.box.setAttribute("aria-activedescendant", this.pool[this.at - first].box.id);
    else this.box.removeAttribute("aria-activedescendant");
  }

  newRow() {
    const row = { box: element("div", "row", { id: `${this.id}-${this.pool.length}` }) };
    row.name = element("span", "name");
    row.twisty = element("span", "twisty", { "aria-hidden": "true" });
    row.text = element("span", "text");
    row.path = element("span", "path");
    row.leaf = element("span");
    row.badge = element("span", "badge");
    row.shape = element("span", "shape");
    row.kind = element("span", "kind");
    row.key = element("span", "key", { textContent: "■", "aria-hidden": "true" });
    row.type = element("span");
    row.size = element("span", "size");
    row.statistic = element("span", "statistic");
    row.text.append(row.path, row.leaf);
    row.name.append(row.twisty, row.text, row.badge);
    row.kind.append(row.key, row.type);
    row.box.append(row.name, row.shape, row.kind, row.size, row.statistic);
    this.layer.append(row.box);
    return row;
  }

  fill(row, at) {
    const item = this.items[at];
    const depth = this.depths === null ? 0 : this.depths[at];
    row.at = at;
    row.box.setAttribute("role", this.tree ? "treeitem" : "option");
    row.box.setAttribute("aria-selected", String(at === this.at));
    row.box.setAttribute("aria-setsize", String(this.items.length));
    row.box.setAttribute("aria-posinset", String(at + 1));
    row.box.classList.toggle("xckpt-selected", at === this.at);
    row.box.classList.toggle("xckpt-module", item < 0);
    row.name.style.paddingLeft = `${depth * INDENT}px`;
    row.twisty.hidden = !this.tree;
    if (item < 0) this.fillModule(row, -1 - item);
    else this.fillTensor(row, item, depth);
  }

  fillModule(row, node) {
    const open = this.tree.isOpen(node);
    row.box.setAttribute("aria-expanded", String(open));
    row.box.title = "";
    this.mark(row, []);
    row.statistic.classList.remove("xckpt-of-codes");
    row.twisty.textContent = open ? "▾" : "▸";
    row.path.textContent = "";
    row.leaf.textContent = printable(this.tree.label(node));
    const count = this.tree.counts[node];
    row.shape.textContent = `${grouped.format(count)} ${count === 1 ? "tensor" : "tensors"}`;
    row.key.hidden = true;
    row.type.textContent = "";
    row.size.textContent = binarySize(this.tree.nbytes[node]);
    row.statistic.textContent = "";
  }

  fillTensor(row, tensor, depth) {
    const { names, kinds, kind, colors, shapes, shape, nbytes } = this.tensors;
    const name = printable(names[tensor]) || '""';
    const leaf = this.tree ? printable(names[tensor].slice(this.tree.above(tensor))) || name : name;
    const marks = this.tensors.found.get(tensor) ?? [];
    this.mark(row, marks);
    const taken = depth * INDENT + (this.tree ? TWISTY : 0) + row.badge.offsetWidth;
    const room = Math.max(8, Math.floor((row.name.clientWidth - taken) / this.width));
    const text = elided(leaf, room, this.tree ? 0 : this.prefix);
    const cut = this.tree ? 0 : mutedLength(text);
    row.box.removeAttribute("aria-expanded");
    row.box.title = [name, ...marks.map((mark) => mark[2])].join("\n");
    row.twisty.textContent = "";
    row.path.textContent = text.slice(0, cut);
    row.leaf.textContent = text.slice(cut);
    row.shape.textContent = shapes[shape[tensor]];
    row.key.hidden = false;
    row.key.style.color = colors[kind[tensor]];
    row.type.textContent = kinds[kind[tensor]];
    row.size.textContent = binarySize(nbytes[tensor]);
    const known = this.tensors.known[tensor] && this.statistic >= 0;
    const codes = known && this.tensors.isOfCodes(tensor, this.statistic);
    const value = known ? figure(this.tensors.statistic(tensor, this.statistic)) : "";
    row.statistic.textContent = codes ? "codes" : value;
    row.statistic.classList.toggle("xckpt-of-codes", Boolean(codes));
  }

  /** Show what is wrong with a tensor, the worst of it in words. */
  mark(row, marks) {
    const worst = marks.find((mark) => mark[1] === "error") ?? marks[0];
    row.badge.hidden = worst === undefined;
    row.badge.textContent = worst === undefined ? "" : worst[0] + (marks.length > 1 ? " …" : "");
    for (const severity of ["error", "warning", "info"]) {
      row.box.classList.toggle(`xckpt-${severity}`, worst !== undefined && worst[1] === severity);
    }
  }

  /** Put the cursor on a row of the list, and that into sight. */
  move(at) {
    if (!this.items.length) return;
    this.at = Math.max(0, Math.min(this.items.length - 1, at));
    const page = this.box.clientHeight;
    const top = this.at * ROW_HEIGHT;
    const scrolled = this.box.scrollTop * this.scale;
    if (top < scrolled) this.box.scrollTop = top / this.scale;
    else if (top + ROW_HEIGHT > scrolled + page) {
      this.box.scrollTop = (top + ROW_HEIGHT - page) / this.scale;
    }
    this.draw();
  }

  choose(at) {
    this.move(at);
    const item = this.items[this.at];
    if (item >= 0) this.chosen(item);
  }

  click(event) {
    const row = this.pool.find((one) => one.box.contains(event.target));
    if (row === undefined) return;
    this.choose(row.at);
    if (this.items[row.at] < 0) this.toggled(-1 - this.items[row.at]);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW_HEIGHT) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    Object.assign(moves, { Home: -Infinity, End: Infinity });
    if (event.key in moves) this.choose(this.at + moves[event.key]);
    else if (!this.tree || !this.turn(event.key)) return;
    event.preventDefault();
  }

  /** Open and close modules with the keyboard, as trees do everywhere. */
  turn(key) {
    const item = this.items[this.at];
    if (item === undefined) return false;
    const open = item < 0 && this.tree.isOpen(-1 - item);
    if (item < 0 && (key === "Enter" || key === " ")) this.toggled(-1 - item);
    else if (key === "ArrowRight" && item < 0 && !open) this.toggled(-1 - item);
    else if (key === "ArrowRight" && open) this.choose(this.at + 1);
    else if (key === "ArrowLeft" && open) this.toggled(-1 - item);
    else if (key === "ArrowLeft") this.choose(this.above(this.at));
    else return false;
    return true;
  }

  above(at) {
    for (let before = at - 1; before >= 0; before -= 1) {
      if (this.depths[before] < this.depths[at]) return before;
    }
    return at;
  }
}

/** Say how much of a name is the path of the module, which many names share. */
function mutedLength(name) {
  return name.split(WORDS).slice(0, -2).join("").length;
}

// --- the tensor that is selected -----------------------------------------------------------------

class Detail {
  constructor(tensors, model) {
    this.tensors = tensors;
    this.model = model;
    this.row = -1;
    this.histograms = new Map();
    this.failures = new Map();
    this.shares = new Map(); // how far the statistics of a row are
    this.logarithmic = false;
    this.box = element("section", "detail", { "aria-label": "Selected tensor" });
  }

  show(row) {
    this.row = row;
    this.draw();
  }

  draw() {
    if (this.row < 0) {
      const hint = "Select a tensor, by mouse or with ↑ ↓, to see its statistics and histogram.";
      this.box.replaceChildren(element("p", "hint", { textContent: hint }));
      return;
    }
    const body = element("div", "body");
    body.append(this.figures(), this.histogram());
    this.box.replaceChildren(this.head(), body);
  }

  head() {
    const { names, kinds, kind, shapes, shape, nbytes } = this.tensors;
    const head = element("div", "head");
    const name = element("div", "title xckpt-name");
    for (const part of (printable(names[this.row]) || '""').split(WORDS)) {
      name.append(part, element("wbr"));
    }
    const copy = element("button", "button", { type: "button", textContent: "Copy code" });
    const code = this.model.get("_code");
    copy.title = code;
    copy.addEventListener("click", () => copyText(code, copy));
    const facts = [kinds[kind[this.row]], shapes[shape[this.row]], binarySize(nbytes[this.row])];
    head.append(name, copy, element("div", "facts", { textContent: facts.join(" · ") }));
    return head;
  }

  figures() {
    const box = element("div", "figures");
    const failure = this.failures.get(this.row);
    if (failure !== undefined) {
      box.append(element("p", "failure", { role: "alert", textContent: failure }));
      return box;
    }
    if (!this.tensors.known[this.row]) {
      box.append(element("p", "hint", { role: "status", textContent: "Computing statistics…" }));
      const share = this.shares.get(this.row);
      if (share !== undefined) box.append(element("progress", "", { max: 1, value: share }));
      return box;
    }
    for (const [, severity, text] of this.tensors.found.get(this.row) ?? []) {
      box.append(element("p", `mark xckpt-${severity}`, { textContent: text }));
    }
    if (this.tensors.codes[this.row]) {
      const text = "These are codes: the weights are codes times the scales next to them.";
      box.append(element("p", "mark xckpt-info", { textContent: text }));
      box.append(element("div", "label", { textContent: "numbers of the codes, not of the weights" }));
    }
    const [plain, quantiles] = [element("dl", "plain"), element("dl", "quantiles")];
    this.tensors.statistics.forEach((name, number) => {
      const value = this.tensors.statistic(this.row, number);
      if (Number.isNaN(value)) return;
      const quantile = /^q[\d.]+$/.test(name);
      const label = quantile ? `${Number((name.slice(1) * 100).toPrecision(6))} %` : name;
      const pair = element("div");
      if ((name === "nan" || name === "inf") && value > 0) pair.className = "xckpt-wrong";
      pair.append(
        element("dt", "", { textContent: label }),
        element("dd", "", { textContent: figure(value), title: String(value) }),
      );
      (quantile ? quantiles : plain).append(pair);
    });
    box.append(plain);
    if (quantiles.childElementCount) {
      box.append(element("div", "label", { textContent: "quantiles" }), quantiles);
    }
    return box;
  }

  histogram() {
    const box = element("div", "histogram");
    const found = this.histograms.get(this.row);
    if (found === undefined) return box;
    const { edges, counts } = found;
    const most = counts.reduce((a, b) => Math.max(a, b), 0);
    if (!most) {
      box.append(element("p", "hint", { textContent: "No finite elements." }));
      return box;
    }
    const label = element("label", "scale", {});
    const check = element("input", "", { type: "checkbox", checked: this.logarithmic });
    check.addEventListener("change", () => {
      this.logarithmic = check.checked;
      this.draw();
      this.box.querySelector(".xckpt-scale input").focus();
    });
    label.append(check, "log scale");
    const reading = element("span", "reading");
    const caption = element("div", "caption");
    caption.append(reading, label);
    const axis = element("div", "axis");
    for (const edge of [edges[0], (edges[0] + edges.at(-1)) / 2, edges.at(-1)]) {
      axis.append(element("span", "", { textContent: figure(edge) }));
    }
    box.append(caption, this.bars(edges, counts, most, reading), axis);
    return box;
  }

  bars(edges, counts, most, reading) {
    const [low, high] = [edges[0], edges.at(-1)];
    const text = `Histogram of ${counts.length} bins from ${figure(low)} to ${figure(high)}`;
    const svg = picture("svg", { viewBox: "0 0 100 100", role: "img", "aria-label": text });
    svg.setAttribute("preserveAspectRatio", "none");
    const scaled = this.logarithmic
      ? (count) => Math.log1p(count) / Math.log1p(most)
      : (count) => count / most;
    const place = (edge) => ((edge - low) / (high - low || 1)) * 100;
    counts.forEach((count, n) => {
      if (!count) return;
      const [x, height] = [place(edges[n]), Math.max(0.8, scaled(count) * 100)];
      const width = Math.max(0.2, place(edges[n + 1]) - x);
      svg.append(picture("rect", { x, y: 100 - height, width, height }));
    });
    const whole = `highest bin ${figure(most)}`;
    reading.textContent = whole;
    svg.addEventListener("pointermove", (event) => {
      const area = svg.getBoundingClientRect();
      const value = low + ((event.clientX - area.left) / area.width) * (high - low);
      const n = counts.findIndex((_, k) => value >= edges[k] && value <= edges[k + 1]);
      if (n < 0) return;
      reading.textContent = `${figure(edges[n])} to ${figure(edges[n + 1])}: ${figure(counts[n])}`;
    });
    svg.addEventListener("pointerleave", () => (reading.textContent = whole));
    return svg;
  }
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that are not served over HTTPS or from this machine have no clipboard.
    const area = element("textarea", "", { value: text });
    button.after(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy code"), 1200);
}

// --- the whole -----------------------------------------------------------------------------------

class Explorer {
  constructor(model) {
    this.model = model;
    this.tensors = new Tensors(model);
    this.tree = null;
    this.order = this.tensors.sorted("file", false);
    this.box = element("div", "explorer", { role: "group", "aria-label": "Tensor explorer" });
    // JupyterLab would take letters and arrows for its own commands.
    this.box.setAttribute("data-lm-suppress-shortcuts", "true");
    this.box.addEventListener("keydown", (event) => event.stopPropagation());
    this.list = new List(this.tensors, (row) => this.choose(row), (node) => this.toggle(node));
    this.detail = new Detail(this.tensors, model);
    const { columns, box } = this.list;
    this.alert = element("p", "alert xckpt-failure", { role: "alert", hidden: true });
    const errors = model.get("_errors").map((textContent) =>
      element("p", "alert xckpt-failure", { textContent }));
    const footer = this.footer();
    this.box.append(this.toolbar(), ...errors, this.alert, columns, box, footer, this.detail.box);
    this.timer = 0;
    this.refresh();
    this.detail.show(-1);
  }

  toolbar() {
    const { kinds, statistics } = this.tensors;
    const bar = element("div", "toolbar");
    this.search = element("input", "search", {
      type: "search",
      placeholder: "Search: a word in names, or a glob of whole names such as *.q_proj.*",
      "aria-label": "Search: a word in names, or a glob of whole names",
      spellcheck: false,
      autocomplete: "off",
    });
    const types = kinds.slice(0, MOST_KINDS).map((kind, n) => [kind, String(n)]);
    this.type = chooser("Type", [["all types", "-1"], ...types]);
    const sorts = ["file", "name", "size", ...statistics];
    const named = { file: "file order" };
    this.sort = chooser("Sort by", sorts.map((by) => [`by ${named[by] ?? by}`, by]));
    this.direction = element("button", "button", { type: "button" });
    this.view = element("button", "button", { type: "button", textContent: "Tree" });
    this.view.setAttribute("aria-pressed", "false");
    this.search.addEventListener("input", () => {
      // A row that was passed just before, and does not match, would end the search.
      clearTimeout(this.timer);
      this.refresh(true);
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowDown") return;
      event.preventDefault();
      this.list.box.focus();
      this.list.choose(Math.max(0, this.list.at));
    });
    this.type.addEventListener("change", () => this.refresh(true));
    this.wrong = element("button", "button xckpt-wrong-only", { type: "button", hidden: true });
    this.wrong.setAttribute("aria-pressed", "false");
    this.wrong.title = "Show only tensors with something wrong";
    this.wrong.addEventListener("click", () => {
      this.filterWrong(this.wrong.getAttribute("aria-pressed") === "false");
      this.refresh(true);
    });
    this.sort.addEventListener("change", () => {
      this.resort(!["file", "name"].includes(this.sort.value)); // figures largest first
    });
    this.direction.addEventListener("click", () => this.resort(!this.descending));
    this.view.addEventListener("click", () => this.turn());
    bar.append(this.search, this.type, this.wrong, this.sort, this.direction, this.view);
    return bar;
  }

  footer() {
    const bar = element("div", "footer");
    this.status = element("span", "status", { role: "status" });
    this.compute = element("button", "button", { type: "button" });
    this.done = element("progress", "", { hidden: true, "aria-label": "Tensors with statistics" });
    this.asked = [];
    this.compute.addEventListener("click", () => {
      this.alert.hidden = true;
      const rows = Uint32Array.from(this.matching.filter((row) => !this.tensors.known[row]));
      this.asked = rows;
      this.model.send({ ask: "compute" }, undefined, [rows.buffer]);
    });
    this.figures = element("span", "work", { hidden: true });
    this.cancel = element("button", "button", { type: "button", textContent: "Cancel" });
    this.cancel.hidden = true;
    this.cancel.addEventListener("click", () => this.model.send({ ask: "cancel" }));
    bar.append(this.status, this.done, this.figures, this.cancel, this.compute);
    return bar;
  }

  filterWrong(pressed) {
    this.wrong.setAttribute("aria-pressed", String(pressed));
  }

  /** Say how many tensors have something wrong. */
  countWrong() {
    const { found } = this.tensors;
    const severities = [...found.values()].flatMap((marks) => marks.map((mark) => mark[1]));
    this.wrong.hidden = !found.size;
    this.wrong.textContent = `⚠ ${grouped.format(found.size)} with findings`;
    this.wrong.classList.toggle("xckpt-error", severities.includes("error"));
  }

  /** Sort anew. */
  resort(descending = this.descending ?? false) {
    this.descending = descending;
    const by = this.sort.value;
    this.order = this.tensors.sorted(by, descending);
    this.list.statistic = this.tensors.statistics.indexOf(by);
    const shown = this.list.statistic >= 0;
    this.box.classList.toggle("xckpt-sorted", shown);
    this.list.columns.lastChild.textContent = shown ? by : "";
    this.refresh(true);
  }

  /** Filter anew, and show what is left. */
  refresh(top = false) {
    const { names, kind, nbytes, count } = this.tensors;
    const matches = matcher(this.search.value);
    const type = Number(this.type.value);
    const wrong = this.wrong.getAttribute("aria-pressed") === "true";
    const { found } = this.tensors;
    const fits = (row) =>
      (type < 0 || kind[row] === type) && (!wrong || found.has(row)) && matches(names[row]);
    this.matching = this.order.filter(fits);
    this.countWrong();
    this.measure();
    const at = this.list.items[this.list.at];
    if (this.tree === null) {
      this.list.show(Int32Array.from(this.matching), null, null);
    } else {
      this.tree.open = this.matching.length <= FEW_MATCHES;
      const { items, depths } = this.tree.visible(this.matching, nbytes);
      this.list.show(items, depths, this.tree);
    }
    this.list.at = at === undefined ? -1 : this.list.items.indexOf(at);
    if (top) this.list.box.scrollTop = 0;
    this.list.draw();
    const filtered = this.matching.length < count;
    this.list.empty.textContent = count ? this.nothing() : "There are no tensors here.";
    const size = binarySize(this.matching.reduce((sum, row) => sum + nbytes[row], 0));
    const of = filtered ? ` of ${grouped.format(count)}` : "";
    const tensors = `${of} ${count === 1 ? "tensor" : "tensors"}`;
    this.status.textContent = `${grouped.format(this.matching.length)}${tensors} · ${size}`;
    this.direction.textContent = this.descending ? "↓" : "↑";
    this.direction.setAttribute("aria-label", this.descending ? "Largest first" : "Smallest first");
    this.direction.title = this.direction.getAttribute("aria-label");
    this.showWork();
  }

  /** Leave out what all names begin with, where some do not fit. */
  measure() {
    const { names } = this.tensors;
    let longest = 0;
    for (const row of this.matching) longest = Math.max(longest, names[row].length);
    this.list.longest = longest;
    this.list.shared = sharedPrefix(Array.from(this.matching, (row) => names[row]));
  }

  nothing() {
    const query = printable(this.search.value);
    if (!query) return "No tensor is of this kind.";
    if (!WILDCARD.test(query)) return `No name has “${query}” in it.`;
    return `No whole name matches ${query}. A glob may need * at its ends.`;
  }

  showWork() {
    const busy = this.model.get("_busy");
    const missing = this.matching.reduce((sum, row) => sum + 1 - this.tensors.known[row], 0);
    const filtered = this.matching.length < this.tensors.count;
    const which = filtered ? ` ${grouped.format(this.matching.length)}` : "";
    this.compute.disabled = busy || !missing;
    const done = this.asked.reduce((sum, row) => sum + this.tensors.known[row], 0);
    this.done.hidden = !busy || !this.asked.length;
    this.done.max = Math.max(1, this.asked.length);
    this.done.value = done;
    this.figures.textContent = this.model.get("_figures");
    this.figures.hidden = this.cancel.hidden = !busy;
    if (busy) this.compute.textContent = "Computing…";
    else if (missing) this.compute.textContent = `Compute all${which}`;
    else this.compute.textContent = "Statistics are complete";
    this.compute.hidden = !this.matching.length;
  }

  turn() {
    this.tree = this.tree === null ? (this.grown ??= new Tree(this.tensors.names)) : null;
    this.view.setAttribute("aria-pressed", String(this.tree !== null));
    this.box.classList.toggle("xckpt-as-tree", this.tree !== null);
    if (this.tree !== null && this.detail.row >= 0) this.tree.reveal(this.detail.row);
    this.refresh();
    this.find(this.detail.row);
  }

  toggle(node) {
    this.tree.toggle(node);
    this.refresh();
  }

  /** Show a row that was chosen here; tell Python once the choice has settled. */
  choose(row) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      if (this.model.get("_row") === row) return;
      this.model.set("_row", row);
      this.model.save_changes();
    }, SETTLING);
  }

  /** Show the row that Python says is selected. */
  selected() {
    const row = this.model.get("_row");
    if (row >= 0 && this.list.items[this.list.at] !== row) {
      this.tree?.reveal(row);
      if (!this.matching.includes(row)) {
        this.search.value = "";
        this.type.value = "-1";
        this.filterWrong(false);
      }
      this.refresh();
      this.find(row);
    }
    this.detail.show(row);
  }

  find(row) {
    const at = this.list.items.indexOf(row);
    if (row >= 0 && at >= 0) this.list.move(at);
  }

  /** Take what Python tells. */
  hear(message, buffers) {
    if (message.tell === "statistics") {
      const rows = numbers(Uint32Array, buffers[0]);
      this.tensors.receive(rows, numbers(Float64Array, buffers[1]));
      if (rows.includes(this.detail.row)) this.detail.draw();
      this.soonAgain();
    } else if (message.tell === "histogram") {
      const [edges, counts] = buffers.map((buffer) => numbers(Float64Array, buffer));
      this.detail.histograms.set(message.row, { edges, counts });
      this.detail.draw();
    } else if (message.tell === "findings") {
      for (const [row, rule, severity, value, sentence] of message.found) {
        const words = rule.replaceAll("_", " ");
        const text = sentence ? `${words}: ${sentence}` : `${words} (${value})`;
        this.tensors.mark(row, BADGES[rule] ?? words, severity, `${severity}: ${text}`);
      }
      this.soonAgain();
    } else if (message.tell === "working") {
      this.detail.shares.set(message.row, message.share);
      if (message.row === this.detail.row) this.detail.draw();
    } else if (message.tell === "failed") {
      this.detail.failures.set(message.row, message.reason);
      this.tensors.mark(message.row, "failed", "error", `error: ${message.reason}`);
      this.detail.draw();
      this.soonAgain();
    } else if (message.tell === "stopped") {
      this.alert.textContent = `Stopped: ${message.reason}`;
      this.alert.hidden = false;
    }
  }

  /** Show what is new in the rows at once, and sort and filter anew, not too often. */
  soonAgain() {
    this.list.draw();
    this.countWrong();
    this.soon ??= setTimeout(() => {
      this.soon = null;
      if (this.list.statistic >= 0) {
        this.order = this.tensors.sorted(this.sort.value, this.descending);
      }
      this.refresh();
    }, REFRESHING);
  }

  close() {
    clearTimeout(this.timer);
    clearTimeout(this.soon);
    this.list.resized.disconnect();
  }
}

function render({ model, el }) {
  const explorer = new Explorer(model);
  const heard = {
    "msg:custom": (message, buffers) => explorer.hear(message, buffers),
    "change:_row": () => explorer.selected(),
    "change:_code": () => explorer.detail.draw(),
    "change:_busy": () => explorer.showWork(),
    "change:_figures": () => explorer.showWork(),
  };
  for (const [event, listener] of Object.entries(heard)) model.on(event, listener);
  el.append(explorer.box);
  explorer.selected();
  // What was computed before this view was there.
  model.send({ ask: "known" });
  return () => {
    for (const [event, listener] of Object.entries(heard)) model.off(event, listener);
    explorer.close();
  };
}

export default { render };
