// The page: drawing, sliders, dragging, and what they show. The networks are in networks.js.
"use strict";

const $ = (id) => document.getElementById(id);
const about = JSON.parse($("about").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = [[230, 159, 0], [86, 180, 233]]; // of the two digits, as --first and --second of the style sheet
const SIDE = about.digits.config.imageSize;
const MAX_ITERATIONS = 5;

// ------------------------------------------------------------------------------------------------------- small helpers

// An element with properties (or SVG attributes) and children.
function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}
function shape(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function signed(x, digits = 2) {
  const size = Math.abs(x).toFixed(digits);
  return (Number(size) === 0 ? "" : x < 0 ? "−" : "+") + size;
}
const swatch = (k) => element("span", { className: `swatch ${["first", "second"][k]}` });
const bold = (text) => element("b", { textContent: text });
const article = (digit) => (digit === 8 ? "an" : "a");

// Calls of the same function between two frames of the screen become one.
const waiting = new Set();
function soon(update) {
  if (waiting.has(update)) return;
  waiting.add(update);
  requestAnimationFrame(() => { waiting.delete(update); update(); });
}

// Milliseconds of the latest update of each kind.
const timings = {};
function timed(name, work) {
  const start = performance.now();
  const result = work();
  timings[name] = performance.now() - start;
  return result;
}

// Pictures of `side` x `side` grey levels, each in its colour, added up on black.
function paint(canvas, pictures, colours, side) {
  const image = new ImageData(side, side);
  for (let k = 0; k < side * side; k++) {
    for (let channel = 0; channel < 3; channel++) {
      let sum = 0;
      pictures.forEach((picture, n) => { sum += picture[k] * colours[n][channel]; });
      image.data[4 * k + channel] = sum;
    }
    image.data[4 * k + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}
const WHITE = [255, 255, 255];

// ------------------------------------------------------------------------------------------------------------- weights

// The bytes of the weights: base64 of gzip.
async function unpack() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser is too old for the page: it has no DecompressionStream. Any browser of 2023 or later has.");
  }
  const bytes = Uint8Array.from(atob($("weights").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// The tensors of one part by name, as numbers: int8 times the scale of its last axis, or as they are.
function tensorsOf(part, buffer) {
  const tensors = {};
  for (const { name, shape: sizes, type, at, scaleAt } of part.tensors) {
    const n = sizes.reduce((a, b) => a * b, 1);
    const start = part.offset + at;
    if (type === "float32") {
      tensors[name] = new Float32Array(buffer, start, n);
    } else if (type === "uint8") {
      tensors[name] = Float32Array.from(new Uint8Array(buffer, start, n), (value) => value / 255);
    } else {
      const F = sizes[sizes.length - 1];
      const q = new Int8Array(buffer, start, n);
      const scale = new Float32Array(buffer, part.offset + scaleAt, F);
      const w = new Float32Array(n);
      for (let k = 0; k < n; k++) w[k] = q[k] * scale[k % F];
      tensors[name] = w;
    }
  }
  return tensors;
}

const models = { digits: null, capsules: null, cnn: null };

// -------------------------------------------------------------------------------------------- 1. drawing: the two layers

const ZOOM = 8; // pixels of a layer for one of the network
const LAYER_SIDE = SIDE * ZOOM;
const PEN = 3 * ZOOM;
const MNIST_BOX = 20; // pixels, of the longer side of a digit
const MAX_OFFSET = 1.5; // pixels from the middle, so that two digits are no farther apart than in training

const layers = COLOURS.map((colour) => {
  const canvas = element("canvas", { width: LAYER_SIDE, height: LAYER_SIDE });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  Object.assign(context, { lineWidth: PEN, lineCap: "round", lineJoin: "round" });
  context.strokeStyle = context.fillStyle = `rgb(${colour})`;
  return { canvas, context, exact: null, used: false }; // exact: (36*36) of a test digit
});
const drawing = { layer: 0, pen: null, keys: { x: LAYER_SIDE / 2, y: LAYER_SIDE / 2, down: false, shown: false } };
let exampleIndex = -1; // of the test picture that is shown, or -1

function clearLayers() {
  for (const layer of layers) {
    layer.context.clearRect(0, 0, LAYER_SIDE, LAYER_SIDE);
    Object.assign(layer, { exact: null, used: false });
  }
  exampleIndex = -1;
}

function selectLayer(k) {
  drawing.layer = k;
  document.querySelector(`input[name="layer"][value="${k}"]`).checked = true;
}

// A stroke of the pen. It begins a new picture where a test picture is shown.
function stroke(from, to) {
  if (exampleIndex >= 0) {
    clearLayers();
    dimensions.chosen = null;
  }
  const layer = layers[drawing.layer];
  layer.used = true;
  layer.context.beginPath();
  layer.context.moveTo(from.x, from.y);
  layer.context.lineTo(to.x + 0.01, to.y);
  layer.context.stroke();
  soon(updateDigits);
}

// A layer (36*36) as the network gets it: its strokes averaged over pixels. With `fit` they are first scaled to a box of
// 20 pixels and moved so that their centre of mass is near the middle, as MNIST's digits are.
function layerPicture(layer, fit) {
  if (layer.exact) return layer.exact;
  const picture = new Float32Array(SIDE * SIDE);
  if (!layer.used) return picture;
  const n = LAYER_SIDE;
  const { data } = layer.context.getImageData(0, 0, n, n);
  let [left, right, top, bottom, mass, massX, massY] = [n, -1, n, -1, 0, 0, 0];
  for (let y = 0; y < n; y++) {
    for (let x = 0; x < n; x++) {
      const alpha = data[4 * (y * n + x) + 3];
      if (!alpha) continue;
      left = Math.min(left, x); right = Math.max(right, x);
      top = Math.min(top, y); bottom = Math.max(bottom, y);
      mass += alpha; massX += alpha * (x + 0.5); massY += alpha * (y + 0.5);
    }
  }
  if (!mass) return picture;
  const centre = { x: massX / mass, y: massY / mass };
  const longest = Math.max(right - left, bottom - top) + 1;
  const scale = fit ? Math.max(longest, 1.2 * MNIST_BOX) / MNIST_BOX : ZOOM; // layer pixels for one of the network
  const limited = (x) => Math.min(SIDE / 2 + MAX_OFFSET, Math.max(SIDE / 2 - MAX_OFFSET, x / ZOOM));
  const target = fit ? { x: limited(centre.x), y: limited(centre.y) } : { x: centre.x / ZOOM, y: centre.y / ZOOM };
  const samples = 6; // along each axis of a pixel
  for (let r = 0; r < SIDE; r++) {
    for (let c = 0; c < SIDE; c++) {
      let sum = 0;
      for (let i = 0; i < samples; i++) {
        const y = Math.floor(centre.y + (r + (i + 0.5) / samples - target.y) * scale);
        if (y < top || y > bottom) continue;
        for (let j = 0; j < samples; j++) {
          const x = Math.floor(centre.x + (c + (j + 0.5) / samples - target.x) * scale);
          if (x >= left && x <= right) sum += data[4 * (y * n + x) + 3];
        }
      }
      picture[r * SIDE + c] = sum / (255 * samples * samples);
    }
  }
  return picture;
}

function paintDrawing() {
  const canvas = $("draw");
  const context = canvas.getContext("2d");
  context.globalCompositeOperation = "source-over";
  context.fillStyle = getComputedStyle(canvas).backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.globalCompositeOperation = "lighter"; // colours add up
  for (const layer of layers) context.drawImage(layer.canvas, 0, 0, canvas.width, canvas.height);
  context.globalCompositeOperation = "source-over";
  const { x, y, down, shown } = drawing.keys;
  if (shown) {
    const k = canvas.width / LAYER_SIDE;
    context.lineWidth = 3;
    context.strokeStyle = "#fff";
    context.beginPath();
    context.arc(x * k, y * k, (PEN / 2) * k, 0, 2 * Math.PI);
    context.stroke();
    if (down) { context.fillStyle = "#fff8"; context.fill(); }
  }
  if (!layers.some((layer) => layer.used)) {
    context.fillStyle = "#9aa1ab";
    context.font = "30px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillText("draw a digit", canvas.width / 2, canvas.height / 2);
  }
}

function showExample() {
  const n = about.digits.labels.length;
  const next = (Math.max(exampleIndex, showExample.last) + 1) % n;
  clearLayers();
  exampleIndex = showExample.last = next;
  const small = element("canvas", { width: SIDE, height: SIDE });
  layers.forEach((layer, k) => {
    const start = (next * 2 + k) * SIDE * SIDE;
    layer.exact = models.digits.examples.slice(start, start + SIDE * SIDE);
    layer.used = true;
    const image = new ImageData(SIDE, SIDE);
    layer.exact.forEach((value, at) => image.data.set([...COLOURS[k], 255 * value], 4 * at));
    small.getContext("2d").putImageData(image, 0, 0);
    layer.context.imageSmoothingEnabled = false;
    layer.context.drawImage(small, 0, 0, LAYER_SIDE, LAYER_SIDE);
  });
  dimensions.chosen = null;
  soon(updateDigits);
}
showExample.last = -1;

function setUpDrawing() {
  const canvas = $("draw");
  const position = (event) => {
    const box = canvas.getBoundingClientRect();
    const k = LAYER_SIDE / box.width;
    return { x: (event.clientX - box.left) * k, y: (event.clientY - box.top) * k };
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    drawing.keys.shown = false;
    drawing.pen = position(event);
    stroke(drawing.pen, drawing.pen);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drawing.pen) return;
    for (const part of event.getCoalescedEvents?.() ?? [event]) {
      const to = position(part);
      stroke(drawing.pen, to);
      drawing.pen = to;
    }
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { drawing.pen = null; });
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  canvas.addEventListener("keydown", (event) => {
    const keys = drawing.keys;
    const within = (x) => Math.min(LAYER_SIDE - PEN / 2, Math.max(PEN / 2, x));
    if (event.key === " ") {
      keys.down = !keys.down;
      if (keys.down) stroke(keys, keys);
    } else if (steps[event.key]) {
      const [dx, dy] = steps[event.key];
      const to = { x: within(keys.x + dx * ZOOM), y: within(keys.y + dy * ZOOM) };
      if (keys.down) stroke(keys, to);
      Object.assign(keys, to);
    } else {
      return;
    }
    keys.shown = true;
    event.preventDefault();
    soon(paintDrawing);
  });
  canvas.addEventListener("blur", () => { Object.assign(drawing.keys, { shown: false, down: false }); soon(paintDrawing); });
  for (const input of document.querySelectorAll('input[name="layer"]')) {
    input.addEventListener("change", () => { drawing.layer = Number(input.value); });
  }
  $("clear").addEventListener("click", () => { clearLayers(); selectLayer(0); dimensions.chosen = null; soon(updateDigits); });
  $("example").addEventListener("click", showExample);
  $("fit").addEventListener("change", () => soon(updateDigits));
}

// -------------------------------------------------------------------------------------- 1. the capsules and their routing

const digits = {
  pictures: [], // of the two layers, (36*36) each
  image: null, // what the network sees
  result: null, // of Networks.capsnet
  iteration: about.digits.config.iterations,
  named: [], // the classes of the two longest capsules
  colour: [0, 1], // of each of them
  recon: [],
};

const classes = [...Array(about.digits.config.classes).keys()];
const D = about.digits.config.capsuleSize;
const capsuleOf = ({ v }, j) => v.slice(j * D, (j + 1) * D);

function dot(a, b) {
  let sum = 0;
  for (let k = 0; k < a.length; k++) sum += a[k] * b[k];
  return sum;
}

// The capsule whose reconstruction resembles a layer gets the colour of this layer.
function coloursOf(recon, pictures) {
  const likeness = (k, l) => dot(recon[k], pictures[l]) / (Math.sqrt(dot(recon[k], recon[k]) * dot(pictures[l], pictures[l])) + 1e-9);
  if (!layers[0].used || !layers[1].used) return layers[1].used && !layers[0].used ? [1, 0] : [0, 1];
  return likeness(0, 0) + likeness(1, 1) >= likeness(0, 1) + likeness(1, 0) ? [0, 1] : [1, 0];
}

// Everything that follows from the drawing.
function updateDigits() {
  timed("stroke", () => {
    const fit = $("fit").checked;
    digits.pictures = layers.map((layer) => layerPicture(layer, fit));
    const [first, second] = digits.pictures;
    digits.image = first.map((value, k) => Math.max(value, second[k])); // as in training
    timed("forward", () => {
      digits.result = Networks.capsnet(models.digits, about.digits.config, digits.image, MAX_ITERATIONS);
    });
    updateAnswer();
    paintDrawing();
    paint($("seen"), [digits.image], [WHITE], SIDE);
  });
  $("stroke-time").textContent = `${timings.forward.toFixed(0)} ms`;
}

// Everything that follows from the number of iterations.
function updateAnswer() {
  const now = digits.result.iterations[digits.iteration - 1];
  digits.named = [...classes].sort((a, b) => now.lengths[b] - now.lengths[a]).slice(0, 2);
  digits.recon = digits.named.map((j) => Networks.decoder(models.digits, capsuleOf(now, j), j));
  digits.colour = coloursOf(digits.recon, digits.pictures);
  showBars(now);
  showReconstructions(now);
  showLengths();
  showCouplings(now);
  if (dimensions.chosen === null) dimensions.digit = digits.named[0];
  dimensions.offsets.fill(0);
  updateDimensions();
}

const isEmpty = () => !layers.some((layer) => layer.used);

function showBars({ lengths }) {
  for (const j of classes) {
    const bar = $(`bar${j}`);
    const rank = digits.named.indexOf(j);
    bar.className = `bar ${rank < 0 || isEmpty() ? "" : ["first", "second"][digits.colour[rank]]}`;
    bar.querySelector("i").style.width = `${100 * lengths[j]}%`;
    bar.querySelector(".value").textContent = lengths[j].toFixed(2);
    bar.setAttribute("aria-label", `Digit ${j}: length ${lengths[j].toFixed(2)}`);
  }
  const [a, b] = digits.named;
  const answer = $("answer");
  answer.replaceChildren();
  if (isEmpty()) {
    answer.append("The picture is empty. Draw a digit, or take a test picture.");
    return;
  }
  const there = digits.named.filter((j) => lengths[j] >= 0.5);
  if (there.length === 0) answer.append("No capsule is longer than 0.5. The nearest are ", bold(a), " and ", bold(b), ".");
  if (there.length === 1) answer.append(`The network finds ${article(a)} `, bold(a), ". The next capsule, ", String(b), ", is short.");
  if (there.length === 2) answer.append(`The network finds ${article(a)} `, bold(a), ` and ${article(b)} `, bold(b), ".");
  if (there.length === 2 && !layers.every((layer) => layer.used)) {
    answer.append(" It was trained on pictures of two digits alone, and tends to find a second one.");
  }
  if (exampleIndex >= 0) {
    const labels = about.digits.labels[exampleIndex];
    const right = labels.filter((j) => digits.named.includes(j)).length;
    answer.append(` The test picture was made of ${article(labels[0])} ${labels[0]} and ${article(labels[1])} ${labels[1]}: ${["neither", "one of the two", "both"][right]} found.`);
  }
}

function showReconstructions({ lengths }) {
  digits.named.forEach((j, k) => {
    const colour = COLOURS[digits.colour[k]];
    const pale = isEmpty() ? 0 : lengths[j] < 0.5 ? 0.35 : 1; // a short capsule's drawing means little
    paint($(`recon${k}`), [digits.recon[k]], [colour.map((part) => part * pale)], SIDE);
    $(`recon${k}-text`).replaceChildren(swatch(digits.colour[k]), "drawn from capsule ", bold(j), `, length ${lengths[j].toFixed(2)}`);
  });
  const present = digits.named.map((j, k) => k).filter((k) => lengths[digits.named[k]] >= 0.5);
  const grey = [70, 70, 70];
  paint($("both"), [digits.image, ...present.map((k) => digits.recon[k])],
    [grey, ...present.map((k) => COLOURS[digits.colour[k]].map((part) => 0.8 * part))], SIDE);
}

function showLengths() {
  const svg = $("lengths");
  svg.replaceChildren();
  const [left, right, top, bottom] = [34, 390, 14, 298];
  const x = (t) => left + ((right - left) * t) / (MAX_ITERATIONS - 1);
  const y = (length) => bottom - (bottom - top) * length;
  for (const length of [0, 0.5, 1]) {
    shape(svg, "path", { class: "axis", d: `M${left} ${y(length)}H${right}` });
    shape(svg, "text", { x: left - 8, y: y(length) + 4, "text-anchor": "end" }, length);
  }
  for (let t = 0; t < MAX_ITERATIONS; t++) {
    const current = t + 1 === digits.iteration;
    shape(svg, "text", { x: x(t), y: bottom + 22, "text-anchor": "middle", class: current ? "strong" : "" }, t + 1);
    if (current) shape(svg, "path", { class: "now", d: `M${x(t)} ${top}V${bottom}` });
  }
  const rank = (j) => digits.named.indexOf(j);
  const used = [];
  for (const j of [...classes].sort((a, b) => rank(a) - rank(b))) {
    const points = digits.result.iterations.map(({ lengths }, t) => `${x(t)} ${y(lengths[j])}`);
    const colour = rank(j) < 0 || isEmpty() ? "" : ["first", "second"][digits.colour[rank(j)]];
    shape(svg, "path", { class: `line ${colour}`, d: `M${points.join("L")}` });
    if (colour) used.push({ j, at: y(digits.result.iterations[MAX_ITERATIONS - 1].lengths[j]) });
  }
  used.sort((a, b) => a.at - b.at);
  if (used.length === 2 && used[1].at - used[0].at < 18) used[1].at = used[0].at + 18;
  for (const { j, at } of used) shape(svg, "text", { x: right + 10, y: at + 4, class: "strong" }, `${j}`);
}

// Nine in ten of the small capsules have a coupling to class j between these two.
function couplingRange(c, j) {
  const I = digits.result.size.length;
  const sorted = c.slice(j * I, (j + 1) * I).sort();
  return [0.05, 0.95].map((part) => sorted[Math.round(part * (I - 1))].toFixed(3));
}

function showCouplings({ c }) {
  const { side, types, kernel } = about.digits.config;
  const { size } = digits.result;
  const I = size.length;
  const fullColour = 0.2; // the preference where one coupling is 1.5 times the other
  const canvas = $("couplings");
  const context = canvas.getContext("2d");
  const k = canvas.width / SIDE;
  const grey = element("canvas", { width: SIDE, height: SIDE });
  paint(grey, [digits.image], [[75, 78, 84]], SIDE);
  context.imageSmoothingEnabled = false;
  context.drawImage(grey, 0, 0, canvas.width, canvas.height);
  const [a, b] = digits.named;
  const cells = [];
  for (let row = 0; row < side; row++) {
    for (let column = 0; column < side; column++) {
      let [active, toA, toB] = [0, 0, 0];
      for (let t = 0; t < types; t++) {
        const i = (row * side + column) * types + t;
        active += size[i];
        toA += size[i] * c[a * I + i];
        toB += size[i] * c[b * I + i];
      }
      cells.push({ row, column, active, preference: (toA - toB) / (toA + toB + 1e-12) });
    }
  }
  const most = Math.max(...cells.map(({ active }) => active), 1e-9);
  const middle = kernel - 0.5; // of the 17 pixels that the first small capsule sees
  for (const { row, column, active, preference } of cells) {
    const colour = COLOURS[digits.colour[preference > 0 ? 0 : 1]];
    const strength = Math.min(1, Math.abs(preference) / fullColour);
    const mixed = colour.map((part) => Math.round(150 + (part - 150) * strength));
    context.fillStyle = `rgb(${mixed})`;
    context.beginPath();
    context.arc((middle + 2 * column) * k, (middle + 2 * row) * k, 0.92 * k * Math.sqrt(active / most), 0, 2 * Math.PI);
    context.fill();
  }
  const text = $("coupling-text");
  text.replaceChildren();
  if (isEmpty()) return;
  if (digits.iteration === 1) {
    text.append(bold("Couplings. "), "In the first iteration all are 0.100, a tenth for each class: no small capsule prefers a digit.");
    return;
  }
  text.append(bold("Couplings "), "of the small capsules, most of them (nine in ten): to ");
  digits.named.forEach((j, n) => {
    const [low, high] = couplingRange(c, j);
    text.append(n ? ", to " : "", swatch(digits.colour[n]), bold(j), ` from ${low} to ${high}`);
  });
  text.append(". In the first iteration all are 0.100.");
}

function setUpAnswer() {
  for (const j of classes) {
    const bar = element("button", { type: "button", className: "bar", id: `bar${j}` },
      element("span", { textContent: j }),
      element("span", { className: "track" }, element("i")),
      element("span", { className: "value" }));
    bar.addEventListener("click", () => chooseCapsule(j, true));
    $("bars").append(bar);
  }
  $("iterations").value = digits.iteration;
  $("trained-iterations").textContent = digits.iteration;
  $("n-primary").textContent = about.digits.config.side ** 2 * about.digits.config.types;
  $("iterations").addEventListener("input", () => {
    digits.iteration = Number($("iterations").value);
    $("iterations-value").textContent = digits.iteration;
    soon(updateAnswer);
  });
  $("iterations-value").textContent = digits.iteration;
}

// ------------------------------------------------------------------------------------------------- 2. sixteen dimensions

const dimensions = {
  digit: 0,
  chosen: null, // the class that the person chose; null: the longest capsule's
  offsets: new Float32Array(D),
  playing: null, // { d, start } while a number is played
};

function chooseCapsule(j, scroll) {
  dimensions.chosen = dimensions.digit = j;
  dimensions.offsets.fill(0);
  stopPlaying();
  updateDimensions();
  if (scroll) $("dimensions").scrollIntoView();
}

function changedCapsule() {
  const capsule = capsuleOf(digits.result.iterations[digits.iteration - 1], dimensions.digit);
  return capsule.map((value, d) => value + dimensions.offsets[d]);
}

// All of the section, after another capsule or picture.
function updateDimensions() {
  const j = dimensions.digit;
  for (const k of classes) {
    $(`bar${k}`).setAttribute("aria-pressed", String(k === j));
    $(`pick${k}`).checked = k === j;
  }
  about.digits.names[j].forEach(({ name, effect }, d) => {
    const label = $(`name${d}`);
    label.replaceChildren(name || "no single effect");
    label.style.color = name ? "" : "var(--soft)";
    if (name) label.append(" ", element("small", { textContent: `${signed(effect, 1)} sd` }));
    label.title = name
      ? `From −0.25 to +0.25: ${name} changes by ${signed(effect, 1)} standard deviations of the test digits`
      : "From −0.25 to +0.25 no measure changes by half a standard deviation of the test digits";
  });
  const now = digits.result.iterations[digits.iteration - 1];
  const length = now.lengths[j];
  $("capsule-text").textContent = length < 0.3
    ? `Capsule ${j} has length ${length.toFixed(2)}: there is no ${j} in the picture, and what it draws means little.`
    : `Capsule ${j}, length ${length.toFixed(2)}.`;
  const read = digits.named.includes(j) ? digits.recon[digits.named.indexOf(j)] : Networks.decoder(models.digits, capsuleOf(now, j), j);
  paint($("before"), [read], [WHITE], SIDE);
  updateSliders();
}

// The changed picture and the values beside the sliders.
function updateSliders() {
  timed("slider", () => {
    const picture = Networks.decoder(models.digits, changedCapsule(), dimensions.digit);
    paint($("after"), [picture], [WHITE], SIDE);
    for (let d = 0; d < D; d++) {
      $(`slider${d}`).value = dimensions.offsets[d];
      $(`slider-value${d}`).textContent = signed(dimensions.offsets[d]);
    }
  });
}

function stopPlaying() {
  if (!dimensions.playing) return;
  const button = $(`play${dimensions.playing.d}`);
  button.setAttribute("aria-pressed", "false");
  button.textContent = "▶";
  dimensions.offsets[dimensions.playing.d] = 0;
  dimensions.playing = null;
}

function play(d) {
  const same = dimensions.playing?.d === d;
  stopPlaying();
  if (!same) {
    dimensions.playing = { d, start: performance.now() };
    $(`play${d}`).setAttribute("aria-pressed", "true");
    $(`play${d}`).textContent = "■";
    requestAnimationFrame(playFrame);
  }
  updateSliders();
}

function playFrame(time) {
  if (!dimensions.playing) return;
  const { d, start } = dimensions.playing;
  dimensions.offsets[d] = Number($("range").value) * Math.sin((Math.max(0, time - start) / 2400) * 2 * Math.PI);
  updateSliders();
  requestAnimationFrame(playFrame);
}

function setUpDimensions() {
  for (const j of classes) {
    const input = element("input", { type: "radio", name: "capsule", id: `pick${j}`, value: j });
    input.setAttribute("aria-label", `Digit ${j}`);
    input.addEventListener("change", () => chooseCapsule(j, false));
    $("picker").append(element("label", { className: "segment" }, input, element("span", { textContent: j })));
  }
  for (let d = 0; d < D; d++) {
    const input = element("input", { type: "range", id: `slider${d}`, min: -0.25, max: 0.25, step: 0.01, value: 0 });
    input.addEventListener("input", () => {
      stopPlaying();
      dimensions.offsets[d] = Number(input.value);
      soon(updateSliders);
    });
    const button = element("button", { type: "button", id: `play${d}`, textContent: "▶" });
    button.setAttribute("aria-label", `Play number ${d + 1}`);
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => play(d));
    $("sliders").append(element("div", { className: "slider" },
      element("span", { className: "index", textContent: d + 1 }),
      element("label", { id: `name${d}`, htmlFor: `slider${d}` }),
      input,
      element("output", { id: `slider-value${d}` }),
      button));
  }
  $("range").addEventListener("change", () => {
    const range = Number($("range").value);
    dimensions.offsets = dimensions.offsets.map((value) => Math.max(-range, Math.min(range, value)));
    for (let d = 0; d < D; d++) Object.assign($(`slider${d}`), { min: -range, max: range });
    updateSliders();
  });
  $("reset").addEventListener("click", () => { stopPlaying(); dimensions.offsets.fill(0); updateSliders(); });
}

// -------------------------------------------------------------------------------------------------------- 3. a viewpoint

const part = about.viewpoint;
const view = { object: 1, azimuth: 60, elevation: 30, drag: null, poses: [], ringJob: 0 }; // poses: of the class, all round
const RING_STEP = 5; // degrees
const VIEW_SIDE = part.config.imageSize;

function answersAt(azimuth) {
  const image = Networks.renderVoxels(part.objects[view.object], azimuth, view.elevation, VIEW_SIDE);
  const capsules = Networks.matrixCapsules(models.capsules, part.config, image);
  return { image, capsules, cnn: Networks.cnn(models.cnn, part.config, image) };
}
const best = (scores) => scores.indexOf(Math.max(...scores));

// All of the section but the ring's answers, after every step of a drag.
function updateView() {
  timed("drag", () => {
    const { image, capsules, cnn } = answersAt(view.azimuth);
    paint($("small-view"), [image], [WHITE], VIEW_SIDE);
    paint($("view"), [Networks.renderVoxels(part.objects[view.object], view.azimuth, view.elevation, 128)], [WHITE], 128);
    showAnswers("answer-capsules", capsules.scores);
    showAnswers("answer-cnn", cnn);
    showVerdict(best(capsules.scores), best(cnn));
    showPose(capsules.mu);
    $("azimuth").value = view.azimuth;
    $("elevation").value = view.elevation;
    $("azimuth-value").textContent = `${Math.round(view.azimuth)}°`;
    $("elevation-value").textContent = `${Math.round(view.elevation)}°`;
    showHand();
  });
}

function showAnswers(id, scores) {
  const p = Networks.softmax(scores);
  const top = best(scores);
  [...$(id).children].forEach((bar, j) => {
    bar.className = `small-bar ${j === top ? "best" : ""} ${j === view.object ? "true" : ""}`;
    bar.querySelector("i").style.width = `${100 * p[j]}%`;
    bar.querySelector(".value").textContent = p[j].toFixed(2);
  });
}

const inRange = (x, [low, high]) => (((x - low) % 360) + 360) % 360 <= high - low;
function showVerdict(capsules, cnn) {
  const [low, high] = part.trainElevations;
  const within = inRange(view.azimuth, part.trainAzimuths) && view.elevation >= low && view.elevation <= high;
  const truth = part.classes[view.object];
  const word = (answer) => (answer === view.object ? "right" : `wrong (${part.classes[answer]})`);
  $("verdict").replaceChildren(
    within ? "A side within the trained range. " : "A side that neither network was trained on. ",
    "It is the ", bold(truth), ": the capsules are ", bold(word(capsules)), ", the CNN is ", bold(word(cnn)), ".");
}

// The pose of the object's class as a frame of three arrows, and as numbers.
const ARROWS = ["var(--cnn)", "var(--third)", "var(--capsules)"];
const poseOf = (mu) => [...mu.slice(16 * view.object, 16 * (view.object + 1))];
const arrowEnds = (pose) => [0, 1, 2].map((r) => {
  const [x, y, z] = pose.slice(4 * r, 4 * r + 3);
  return [x + 0.35 * z, -y - 0.35 * z]; // from the right and above
});

function showPose(mu) {
  const pose = poseOf(mu);
  const ends = arrowEnds(pose);
  const turn = view.poses.map(arrowEnds); // the same all round
  const scale = 86 / Math.max(...[...turn, ends].flat(2).map(Math.abs));
  const at = ([x, y]) => `${(scale * x).toFixed(1)} ${(scale * y).toFixed(1)}`;
  const svg = $("frame");
  svg.replaceChildren();
  ARROWS.forEach((colour, r) => {
    if (turn.length) {
      const way = turn.map((frame) => at(frame[r])).join("L");
      shape(svg, "path", { d: `M${way}Z`, style: `fill:none;stroke:${colour};stroke-width:1.2;opacity:0.45` });
    }
  });
  ARROWS.forEach((colour, r) => {
    shape(svg, "path", { d: `M0 0L${at(ends[r])}`, style: `stroke:${colour};stroke-width:4.5;stroke-linecap:round` });
    const [cx, cy] = at(ends[r]).split(" ");
    shape(svg, "circle", { cx, cy, r: 6, style: `fill:${colour}` });
  });
  const limit = 6; // entries of this size have the full colour
  [...$("matrix").children].forEach((cell, k) => {
    const strength = Math.min(1, Math.abs(pose[k]) / limit);
    cell.textContent = signed(pose[k], 1);
    const colour = pose[k] < 0 ? "var(--cnn)" : "var(--capsules)";
    cell.style.background = `color-mix(in srgb, ${colour} ${Math.round(60 * strength)}%, var(--track))`;
  });
}

// The ring: azimuth 0 above, clockwise. Outside the ranges, inside a field every five degrees for each network.
const CENTRE = { x: 220, y: 145 };
function onRing(radius, azimuth) {
  const angle = (azimuth * Math.PI) / 180;
  return `${(CENTRE.x + radius * Math.sin(angle)).toFixed(2)} ${(CENTRE.y - radius * Math.cos(angle)).toFixed(2)}`;
}
function arc(radius, from, to) {
  const end = to - from >= 360 ? from + 359.99 : to;
  return `M${onRing(radius, from)}A${radius} ${radius} 0 ${end - from > 180 ? 1 : 0} 1 ${onRing(radius, end)}`;
}

function setUpRing() {
  const svg = $("ring");
  const range = (angles, style, text) => {
    shape(svg, "path", { d: arc(122, ...angles), style: `fill:none;stroke-width:6;${style}` });
    const middle = (angles[0] + Math.min(angles[1], angles[0] + 360)) / 2;
    const [x, y] = onRing(136, middle).split(" ").map(Number);
    shape(svg, "text", { x, y: y + 4, "text-anchor": x < CENTRE.x - 20 ? "end" : x > CENTRE.x + 20 ? "start" : "middle", class: "strong" }, text);
  };
  range(part.trainAzimuths, "stroke:var(--text)", "trained");
  if (part.heldOut === "azimuth") range(part.testAzimuths, "stroke:var(--soft);stroke-dasharray:3 4", "held out");
  view.fields = [];
  for (let azimuth = 0; azimuth < 360; azimuth += RING_STEP) {
    const [from, to] = [azimuth - RING_STEP / 2 + 0.4, azimuth + RING_STEP / 2 - 0.4];
    view.fields.push(["capsules", "cnn"].map((name, k) =>
      shape(svg, "path", { d: arc(106 - 21 * k, from, to), "data-model": name, style: "fill:none;stroke-width:17;stroke:var(--track)" })));
  }
  for (const [azimuth, anchor, dx, dy] of [[0, "middle", 0, 12], [90, "end", -6, 4], [180, "middle", 0, -4], [270, "start", 6, 4]]) {
    const [x, y] = onRing(72, azimuth).split(" ").map(Number);
    shape(svg, "text", { x: x + dx, y: y + dy, "text-anchor": anchor }, `${azimuth}°`);
  }
  view.hand = shape(svg, "path", { style: "stroke:var(--text);stroke-width:2" });
  view.knob = shape(svg, "circle", { r: 8, style: "fill:var(--text);stroke:var(--card);stroke-width:2.5" });
  $("ring-text").append(
    "Filled: right at this azimuth, for this object and elevation. Outer ring ", element("span", { className: "swatch capsules" }),
    "capsules, inner ring ", element("span", { className: "swatch cnn" }), "CNN. ", element("span", { id: "ring-count" }));
  const turn = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 440 - CENTRE.x;
    const y = ((event.clientY - box.top) / box.height) * 290 - CENTRE.y;
    setView((Math.atan2(x, -y) * 180) / Math.PI, view.elevation);
  };
  svg.addEventListener("pointerdown", (event) => { svg.setPointerCapture(event.pointerId); turn(event); });
  svg.addEventListener("pointermove", (event) => { if (event.buttons) turn(event); });
}

function showHand() {
  view.hand.setAttribute("d", `M${onRing(72, view.azimuth)}L${onRing(114, view.azimuth)}`);
  const [x, y] = onRing(122, view.azimuth).split(" ");
  view.knob.setAttribute("cx", x);
  view.knob.setAttribute("cy", y);
}

// The answers all round, a few azimuths at a time so that the page stays responsive.
function updateRing() {
  const job = ++view.ringJob;
  const right = [0, 0];
  const poses = [];
  let [k, nHeldOut] = [0, 0];
  const next = () => {
    if (job !== view.ringJob) return; // a newer one has begun
    for (const stop = Math.min(k + 4, view.fields.length); k < stop; k++) {
      const azimuth = k * RING_STEP;
      const { capsules, cnn } = answersAt(azimuth);
      poses.push(poseOf(capsules.mu));
      const unseen = part.heldOut === "azimuth" && inRange(azimuth, part.testAzimuths);
      nHeldOut += unseen;
      [capsules.scores, cnn].forEach((scores, n) => {
        const isRight = best(scores) === view.object;
        right[n] += unseen && isRight;
        view.fields[k][n].style.stroke = isRight ? `var(--${["capsules", "cnn"][n]})` : "var(--track)";
      });
    }
    if (k < view.fields.length) {
      setTimeout(next);
      return;
    }
    view.poses = poses;
    soon(updateView);
    if (nHeldOut) $("ring-count").textContent = `Of ${nHeldOut} held-out azimuths the capsules know ${right[0]}, the CNN ${right[1]}.`;
  };
  clearTimeout(view.ringTimer);
  view.ringTimer = setTimeout(next, 100);
}

function setView(azimuth, elevation) {
  const before = view.elevation;
  view.azimuth = ((azimuth % 360) + 360) % 360;
  view.elevation = Math.max(-30, Math.min(80, elevation));
  if (view.elevation !== before) updateRing();
  soon(updateView);
}

function selectObject(j) {
  view.object = j;
  view.poses = [];
  $("pose-title").textContent = `Pose of the class “${part.classes[j]}”`;
  updateRing();
  soon(updateView);
}

function setUpView() {
  part.classes.forEach((name, j) => {
    const input = element("input", { type: "radio", name: "object", value: j, checked: j === view.object });
    input.addEventListener("change", () => { selectObject(j); });
    $("objects").append(element("label", { className: "segment" }, input, element("span", { textContent: name })));
  });
  for (const id of ["answer-capsules", "answer-cnn"]) {
    for (const name of part.classes) {
      $(id).append(element("div", { className: "small-bar" }, element("span", { textContent: name }),
        element("span", { className: "track" }, element("i")), element("span", { className: "value" })));
    }
  }
  $("trained-elevations").textContent = part.trainElevations.map((angle) => `${angle}°`).join(" to ");
  for (let k = 0; k < 16; k++) $("matrix").append(element("span"));
  setUpRing();
  const canvas = $("view");
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    view.drag = { x: event.clientX, y: event.clientY, azimuth: view.azimuth, elevation: view.elevation };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!view.drag) return;
    const perPixel = 180 / canvas.getBoundingClientRect().width;
    setView(view.drag.azimuth + (event.clientX - view.drag.x) * perPixel, view.drag.elevation + (event.clientY - view.drag.y) * perPixel);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { view.drag = null; });
  const steps = { ArrowLeft: [-5, 0], ArrowRight: [5, 0], ArrowUp: [0, -5], ArrowDown: [0, 5] };
  canvas.addEventListener("keydown", (event) => {
    if (!steps[event.key]) return;
    event.preventDefault();
    setView(view.azimuth + steps[event.key][0], view.elevation + steps[event.key][1]);
  });
  for (const id of ["azimuth", "elevation"]) {
    $(id).addEventListener("input", () => setView(Number($("azimuth").value), Number($("elevation").value)));
  }
}

// ------------------------------------------------------------------------------------------------------- 4. the numbers

function showNumbers() {
  const names = { capsules: "matrix capsules", cnn_matched: "CNN, as many parameters" };
  const percent = (x) => `${(100 * x).toFixed(2)}\u00a0%`;
  const rows = [
    ...about.digits.accuracies.map((row) => ["CapsNet", `two digits: ${row.title}`, row]),
    ...part.accuracies.map((row) => [names[row.model], row.title, row]),
  ];
  for (const [model, title, { before, after }] of rows) {
    $("accuracy").tBodies[0].append(element("tr", {}, ...[model, title, percent(before), percent(after)].map(
      (text) => element("td", { textContent: text }))));
  }
  const { run } = about.digits;
  $("provenance").textContent = `Two digits: ${run.dataset}, seed ${run.seed}, ${run.epochs} epochs,`
    + ` ${about.digits.nTest.toLocaleString("en")} test pictures; the ${about.digits.labels.length} test pictures of this page are the first of them.`
    + ` Viewpoint: ${part.run.dataset}, seed ${part.run.seed}, ${part.run.epochs} epochs, ${part.nTest} held-out views with noise; this page draws without noise.`
    + ` Written by make_explorer.py at commit ${(about.commit ?? "unknown").slice(0, 12)}${about.commit?.endsWith("-dirty") ? " with changes" : ""}.`;
}

// --------------------------------------------------------------------------------------------------------------- begin

async function begin() {
  const buffer = await unpack();
  models.digits = tensorsOf(about.digits, buffer);
  const tensors = tensorsOf(part, buffer);
  const ofModel = (prefix) => Object.fromEntries(
    Object.entries(tensors).filter(([name]) => name.startsWith(prefix)).map(([name, w]) => [name.slice(prefix.length), w]));
  models.capsules = ofModel("capsules.");
  models.cnn = ofModel("cnn_matched.");
  // Engines compile what has run some times: without this the first strokes would be slower than the rest.
  const picture = models.digits.examples.slice(0, SIDE * SIDE);
  for (let k = 0; k < 3; k++) Networks.capsnet(models.digits, about.digits.config, picture, MAX_ITERATIONS);
  setUpDrawing();
  setUpAnswer();
  setUpDimensions();
  setUpView();
  showNumbers();
  showExample();
  selectObject(view.object);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => soon(paintDrawing));
  requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.ready = "true"; }));
}

window.explorer = { about, models, digits, dimensions, view, timings, begun: begin() };
window.explorer.begun.catch((error) => {
  $("failure").hidden = false;
  $("failure").textContent = `The page could not start: ${error.message}`;
});
