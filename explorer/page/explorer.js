// The page: drawing, sliders, dragging, and what they show. The networks are in networks.js.
"use strict";

const $ = (id) => document.getElementById(id);
const about = JSON.parse($("about").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = [[225, 135, 190], [60, 190, 140]]; // of the two digits, as --first and --second of the style sheet
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
const percent = (x, places = 1) => `${(100 * x).toFixed(places)}\u00a0%`;
// Means of both networks over many seeds, and their difference.
function studyText({ capsules, cnn, mean, low, high }) {
  const points = (x) => signed(100 * x, 1);
  return `${percent(capsules)} (capsules) and ${percent(cnn)} (CNN): a difference of ${points(mean)} percentage points, 95\u00a0% interval ${points(low)} to ${points(high)}.`;
}
const thousands = (n) => n.toLocaleString("en");
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

const models = { digits: null, pool: null, capsules: null, cnn: null };

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
let strokes = []; // { layer, points: [{ x, y }, …] }, in the order in which they were drawn
const drawing = { layer: 0, pen: null, keys: { x: LAYER_SIDE / 2, y: LAYER_SIDE / 2, down: false, shown: false } };
let exampleIndex = -1; // of the test picture that is shown, or -1

function clearLayers() {
  for (const layer of layers) {
    layer.context.clearRect(0, 0, LAYER_SIDE, LAYER_SIDE);
    Object.assign(layer, { exact: null, used: false });
  }
  strokes = [];
  exampleIndex = -1;
}

// The picture of these strokes alone.
function redraw(kept) {
  clearLayers();
  for (const { layer, points } of kept) {
    points.forEach((to, k) => stroke(points[Math.max(0, k - 1)], to, layer, k === 0));
  }
  dimensions.chosen = null;
  soon(updateDigits);
}

function selectLayer(k) {
  drawing.layer = k;
  document.querySelector(`input[name="layer"][value="${k}"]`).checked = true;
}

// A piece of a stroke of the pen. It begins a new picture where a test picture is shown.
function stroke(from, to, k = drawing.layer, begins = false) {
  if (exampleIndex >= 0) {
    clearLayers();
    dimensions.chosen = null;
  }
  const layer = layers[k];
  layer.used = true;
  if (begins || !strokes.length) strokes.push({ layer: k, points: [] });
  strokes[strokes.length - 1].points.push({ x: to.x, y: to.y });
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

function showExample(index) {
  const next = index ?? (showExample.last + 1) % about.digits.nExamples;
  clearLayers();
  exampleIndex = next;
  if (index === undefined) showExample.last = next;
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
    stroke(drawing.pen, drawing.pen, drawing.layer, true);
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
      if (keys.down) stroke(keys, keys, drawing.layer, true);
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
  $("clear").addEventListener("click", () => { redraw([]); selectLayer(0); });
  $("undo").addEventListener("click", () => redraw(exampleIndex < 0 ? strokes.slice(0, -1) : []));
  $("clear-one").addEventListener("click", () => redraw(strokes.filter(({ layer }) => layer !== drawing.layer)));
  $("example").addEventListener("click", () => showExample());
  $("fit").addEventListener("change", () => soon(updateDigits));
  setUpTray();
}

// Test pictures that only one of the two networks gets right.
function setUpTray() {
  about.digits.labels.slice(about.digits.nExamples).forEach((labels, k) => {
    const index = about.digits.nExamples + k;
    const canvas = element("canvas", { className: "tile", width: SIDE, height: SIDE });
    const start = 2 * index * SIDE * SIDE;
    const [a, b] = [0, 1].map((n) => models.digits.examples.slice(start + n * SIDE * SIDE, start + (n + 1) * SIDE * SIDE));
    paint(canvas, [a.map((value, at) => Math.max(value, b[at]))], [WHITE], SIDE);
    const text = `${labels[0]} and ${labels[1]}: only the ${k % 2 ? "CNN" : "capsules"}`;
    const button = element("button", { type: "button", className: "pick" }, canvas, element("span", {},
      element("span", { className: `swatch ${k % 2 ? "cnn" : "capsules"}` }), `${labels[0]}, ${labels[1]}`));
    button.setAttribute("aria-label", text);
    canvas.setAttribute("aria-hidden", "true");
    button.addEventListener("click", () => { showExample(index); $("draw").scrollIntoView({ block: "nearest" }); });
    $("tray").append(button);
  });
}

// -------------------------------------------------------------------------------------- 1. the capsules and their routing

const digits = {
  pictures: [], // of the two layers, (36*36) each
  image: null, // what the network sees
  result: null, // of Networks.capsnet
  cnn: [], // the CNN's probabilities
  even: false, // all couplings stay a tenth
  child: null, // the small capsule whose votes are shown: { cell, type }, or null for the most active one
  iteration: about.digits.config.iterations,
  named: [], // the classes of the two longest capsules
  share: 0, // of the first one's squared error that goes when the second one's reconstruction is laid over it
  found: [], // those of the two that the page says are there
  colour: [0, 1], // of each of them
  recon: [],
};

const classes = [...Array(about.digits.config.classes).keys()];
const D = about.digits.config.capsuleSize;
const capsuleOf = ({ v }, j) => v.slice(j * D, (j + 1) * D);
// With even couplings nothing is left of the iterations but the first.
const shownIteration = () => (digits.even ? 1 : digits.iteration);
const routed = () => digits.result.iterations[shownIteration() - 1];
const longest = ({ lengths }) => [...classes].sort((a, b) => lengths[b] - lengths[a]).slice(0, 2);

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
    digits.cnn = Networks.cnnPool(models.pool, about.digits.config, digits.image);
    updateAnswer();
    paintDrawing();
    paint($("seen"), [digits.image], [WHITE], SIDE);
  });
  $("stroke-time").textContent = `${timings.forward.toFixed(0)} ms`;
}

// Everything that follows from the number of iterations.
function updateAnswer() {
  const now = routed();
  digits.named = longest(now);
  digits.recon = digits.named.map((j) => Networks.decoder(models.digits, capsuleOf(now, j), j));
  digits.share = shareOf(digits.recon, digits.image);
  digits.found = found(now);
  digits.colour = coloursOf(digits.recon, digits.pictures);
  showBars(now);
  showReconstructions(now);
  showLengths();
  if (dimensions.chosen === null) dimensions.digit = digits.named[0];
  showFormula(now);
  showCouplings(now);
  showEven();
  rememberSoon();
  dimensions.offsets.fill(0);
  updateDimensions();
}

// What make_explorer.py calls the share of the second digit.
function shareOf([first, second], image) {
  let [error, rest] = [0, 0];
  image.forEach((value, k) => {
    error += (value - first[k]) ** 2;
    rest += (value - Math.max(first[k], second[k])) ** 2;
  });
  return 1 - rest / error;
}

// Where even the longest capsule is shorter than the second one of nearly all right answers, no digit is there.
function found({ lengths }) {
  const { least, naming } = about.digits;
  if (isEmpty() || lengths[digits.named[0]] < least) return [];
  return digits.named.slice(0, digits.share >= naming.explains ? 2 : 1);
}

const isEmpty = () => !layers.some((layer) => layer.used);

function showBars({ lengths }) {
  for (const j of classes) {
    const bar = $(`bar${j}`);
    const rank = digits.named.indexOf(j);
    bar.className = `bar ${digits.found.includes(j) ? ["first", "second"][digits.colour[rank]] : ""}`;
    bar.querySelector("i").style.width = `${100 * lengths[j]}%`;
    bar.querySelector(".value").textContent = lengths[j].toFixed(2);
    bar.querySelector(".thin i").style.width = `${100 * digits.cnn[j]}%`;
    bar.setAttribute("aria-label", `Digit ${j}: length ${lengths[j].toFixed(2)}, CNN ${digits.cnn[j].toFixed(2)}`);
  }
  showCnnAnswer();
  const [a, b] = digits.named;
  const answer = $("answer");
  answer.replaceChildren();
  if (isEmpty()) {
    answer.append("The picture is empty. Draw a digit, or take a test picture.");
    return;
  }
  const one = digits.found.map((j) => [article(j), " ", bold(j)]);
  if (one.length === 0) answer.append("No capsule is as long as those of right answers. The nearest are ", bold(a), " and ", bold(b), ".");
  if (one.length === 1) {
    answer.append("The network finds ", ...one[0], ` alone: ${article(b)} ${b} as well would explain ${percent(Math.max(0, digits.share))} of the rest, less than ${percent(about.digits.naming.explains)}.`);
  }
  if (one.length === 2) answer.append("The network finds ", ...one[0], " and ", ...one[1], ".");
  if (exampleIndex >= 0) {
    const labels = about.digits.labels[exampleIndex];
    const right = labels.filter((j) => digits.named.includes(j)).length;
    const [x, y] = labels.map((j) => `${article(j)} ${j}`);
    answer.append(` The picture was made of ${x} and ${y}: ${["neither has", "one of them has", "both have"][right]} one of the two longest capsules.`);
  }
}

// The CNN's answer is the two digits to which it gives the highest probabilities.
function showCnnAnswer() {
  const text = $("cnn-answer");
  const [a, b] = [...classes].sort((i, j) => digits.cnn[j] - digits.cnn[i]);
  text.replaceChildren();
  if (isEmpty()) return;
  const probability = (j) => ` (${digits.cnn[j].toFixed(2)})`;
  text.append(element("span", { className: "swatch cnn" }), "The CNN with pooling: ", bold(a), probability(a), " and ", bold(b), `${probability(b)}.`);
  if (exampleIndex >= 0) {
    const right = about.digits.labels[exampleIndex].filter((j) => j === a || j === b).length;
    text.append(` ${["Neither", "One of the two", "Both"][right]} right.`);
  }
}

// What would be answered with couplings that are all a tenth.
function showEven() {
  const text = $("even-text");
  const row = about.digits.accuracies.find(({ model, metric }) => model === "capsnet" && metric === "set_accuracy");
  const [first, last] = [digits.result.iterations[0], digits.result.iterations[digits.iteration - 1]];
  const answerOf = (iteration) => longest(iteration).map((j) => `${j} (${iteration.lengths[j].toFixed(2)})`).join(" and ");
  text.replaceChildren(digits.even ? "While couplings are even, more iterations change nothing. " : "");
  if (!isEmpty()) {
    text.append("Routed: ", bold(answerOf(last)), ". With even couplings: ", bold(answerOf(first)), ". ");
  }
  text.append(`On ${thousands(about.digits.nTest)} test pictures this network finds both digits of ${percent(row.after)} with routing, and of ${percent(about.digits.evenAccuracy)} with even couplings.${
    Math.abs(row.after - about.digits.evenAccuracy) < 0.01 ? " Routing makes the lengths clearer, and hardly changes the answers." : ""}`);
}

// The ten votes of one small capsule, and what the iteration that is shown makes of them.
function showFormula({ logits, c, s, v, lengths }) {
  const { side, types } = about.digits.config;
  const { size, uHat } = digits.result;
  const I = size.length;
  let i = digits.child;
  if (i === null || i >= I) i = size.indexOf(Math.max(...size));
  formula.shown = i;
  const [row, column, type] = [Math.floor(i / types / side), Math.floor(i / types) % side, i % types];
  const body = $("votes").tBodies[0];
  body.replaceChildren();
  const norm = (x) => Math.sqrt(dot(x, x));
  for (const j of classes) {
    const vote = uHat.subarray((j * I + i) * D, (j * I + i + 1) * D);
    const parent = v.subarray(j * D, (j + 1) * D);
    const sum = s.subarray(j * D, (j + 1) * D);
    const share = (c[j * I + i] * dot(vote, sum)) / (norm(sum) + 1e-9);
    const cells = [norm(vote).toFixed(3), signed(logits[j * I + i], 3), c[j * I + i].toFixed(4), signed(share, 4),
      norm(sum).toFixed(2), lengths[j].toFixed(2), signed(dot(vote, parent), 3)];
    const tr = element("tr", { className: j === dimensions.digit ? "chosen" : "" },
      element("th", { scope: "row", textContent: j }), ...cells.map((textContent) => element("td", { textContent })));
    body.append(tr);
  }
  $("child-text").textContent = `Small capsule of row ${row + 1}, column ${column + 1}, type ${type + 1} of ${types}; its length is ${size[i].toFixed(2)}. ${
    digits.even ? "Even couplings" : `Iteration ${digits.iteration}`}.`;
  $("type").value = type + 1;
}
const formula = { shown: 0 };

function chooseChild(i) {
  digits.child = i;
  showFormula(routed());
  showCouplings(routed());
}

function showReconstructions({ lengths }) {
  digits.named.forEach((j, k) => {
    const colour = COLOURS[digits.colour[k]];
    const isFound = digits.found.includes(j);
    const pale = isEmpty() ? 0 : isFound ? 1 : 0.35;
    paint($(`recon${k}`), [digits.recon[k]], [colour.map((part) => part * pale)], SIDE);
    $(`recon${k}-text`).replaceChildren(swatch(digits.colour[k]), "drawn from capsule ", bold(j), `, length ${lengths[j].toFixed(2)}${isFound || isEmpty() ? "" : ": not named"}`);
  });
  const present = [0, 1].filter((k) => digits.found.includes(digits.named[k]));
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
    const current = t + 1 === shownIteration();
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
  const [chosenRow, chosenColumn] = [Math.floor(formula.shown / types / side), Math.floor(formula.shown / types) % side];
  context.strokeStyle = "#fff";
  context.lineWidth = 3;
  context.strokeRect((middle + 2 * chosenColumn - 1) * k, (middle + 2 * chosenRow - 1) * k, 2 * k, 2 * k);
  const text = $("coupling-text");
  text.replaceChildren();
  if (isEmpty()) return;
  if (shownIteration() === 1) {
    text.append(bold("Couplings. "), digits.even ? "All are held at 0.100." : "In the first iteration all are 0.100, a tenth for each class: no small capsule prefers a digit.");
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
      element("span", { className: "tracks" }, element("span", { className: "track" }, element("i")),
        element("span", { className: "track thin" }, element("i"))),
      element("span", { className: "value" }));
    bar.addEventListener("click", () => { chooseCapsule(j, false); showFormula(routed()); });
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
  $("even").addEventListener("change", () => { digits.even = $("even").checked; soon(updateAnswer); });
  const { side, types, kernel } = about.digits.config;
  for (let t = 0; t < types; t++) $("type").append(element("option", { value: t + 1, textContent: t + 1 }));
  $("type").addEventListener("change", () => {
    chooseChild(Math.floor(formula.shown / types) * types + Number($("type").value) - 1);
  });
  const canvas = $("couplings");
  const chooseCell = (row, column) => {
    const within = (x) => Math.min(side - 1, Math.max(0, x));
    const first = (within(row) * side + within(column)) * types;
    const sizes = digits.result.size.slice(first, first + types);
    chooseChild(first + sizes.indexOf(Math.max(...sizes)));
  };
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = (x, length) => Math.round(((x / length) * SIDE - (kernel - 0.5)) / 2);
    chooseCell(at(event.clientY - box.top, box.height), at(event.clientX - box.left, box.width));
  });
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  canvas.addEventListener("keydown", (event) => {
    if (!steps[event.key]) return;
    event.preventDefault();
    const cell = Math.floor(formula.shown / types);
    chooseCell(Math.floor(cell / side) + steps[event.key][0], (cell % side) + steps[event.key][1]);
  });
  const of = (model) => about.digits.accuracies.find((row) => row.model === model && row.metric === "set_accuracy").after;
  const [capsules, cnn] = [of("capsnet"), of("cnn_pool")];
  $("better").replaceChildren(`On ${thousands(about.digits.nTest)} test pictures the capsules find both digits of `, bold(percent(capsules)),
    ", the CNN with pooling and as many parameters of ", bold(percent(cnn)),
    `: here ${capsules > cnn ? "the capsules are" : "the CNN is"} better. `, about.digits.study
      ? `Over ${about.digits.study.n} trainings of each, with different seeds, they find ${studyText(about.digits.study)}`
      : "This is one training of each; the repository has many.");
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
  const capsule = capsuleOf(routed(), dimensions.digit);
  return capsule.map((value, d) => value + dimensions.offsets[d]);
}

// All of the section, after another capsule or picture.
function updateDimensions() {
  const j = dimensions.digit;
  for (const k of classes) {
    $(`bar${k}`).setAttribute("aria-pressed", String(k === j));
    $(`pick${k}`).checked = k === j;
  }
  const order = [...about.digits.names[j].keys()].sort((a, b) => {
    const effect = (d) => (about.digits.names[j][d].name ? Math.abs(about.digits.names[j][d].effect) : 0);
    return effect(b) - effect(a) || a - b;
  });
  order.forEach((d, place) => { $(`slider${d}`).parentNode.style.order = place; });
  about.digits.names[j].forEach(({ name, effect }, d) => {
    const label = $(`name${d}`);
    label.replaceChildren(name || "no single effect");
    label.style.color = name ? "" : "var(--soft)";
    if (name) label.append(" ", element("small", { textContent: `${signed(effect, 1)} sd` }));
    label.title = name
      ? `From −0.25 to +0.25: ${name} changes by ${signed(effect, 1)} standard deviations of the test digits`
      : "From −0.25 to +0.25 no measure changes by half a standard deviation of the test digits";
  });
  const now = routed();
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
const view = { object: 0, azimuth: 60, elevation: 30, drag: null, poses: [], ringJob: 0 }; // poses: of the class, all round
const RING_STEP = 5; // degrees
const VIEW_SIDE = part.config.imageSize;

function answersAt(azimuth) {
  const image = Networks.renderVoxels(part.objects[view.object], azimuth, view.elevation, VIEW_SIDE);
  const capsules = Networks.matrixCapsules(models.capsules, part.config, image);
  return { image, capsules, cnn: Networks.cnn(models.cnn, part.config, image) };
}
const ACTIVATIONS = part.config.loss === "spread"; // its scores are the activations, from 0 to 1
const best = (scores) => scores.indexOf(Math.max(...scores));

// All of the section but the ring's answers, after every step of a drag.
function updateView() {
  timed("drag", () => {
    const { image, capsules, cnn } = answersAt(view.azimuth);
    paint($("small-view"), [image], [WHITE], VIEW_SIDE);
    paint($("view"), [Networks.renderVoxels(part.objects[view.object], view.azimuth, view.elevation, 128)], [WHITE], 128);
    showAnswers("answer-capsules", ACTIVATIONS ? capsules.a : Networks.softmax(capsules.scores), capsules.scores);
    showAnswers("answer-cnn", Networks.softmax(cnn), cnn);
    showVerdict(best(capsules.scores), best(cnn));
    showPose(capsules.mu);
    $("azimuth").value = view.azimuth;
    $("elevation").value = view.elevation;
    $("azimuth-value").textContent = `${Math.round(view.azimuth)}°`;
    $("elevation-value").textContent = `${Math.round(view.elevation)}°`;
    showHand();
  });
}

function showAnswers(id, p, scores) {
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
  const the = truth.includes(" ") ? "" : "the "; // shape 1, but the cross
  const word = (answer) => (answer === view.object ? "right" : `wrong (${part.classes[answer]})`);
  $("verdict").replaceChildren(
    within ? "A side within the trained range. " : "A side that neither network was trained on. ",
    `It is ${the}`, bold(truth), ": the capsules are ", bold(word(capsules)), ", the CNN is ", bold(word(cnn)), ".");
}

// The pose of the object's class as a frame of three arrows, and as numbers.
const ARROWS = ["var(--cnn)", "var(--third)", "var(--capsules)"];
const POSE_ZERO = 0.05; // smaller entries are shown as 0.0
const poseOf = (mu) => [...mu.slice(16 * view.object, 16 * (view.object + 1))];
const arrowEnds = (pose) => [0, 1, 2].map((r) => {
  const [x, y, z] = pose.slice(4 * r, 4 * r + 3);
  return [x + 0.35 * z, -y - 0.35 * z]; // from the right and above
});

function showPose(mu) {
  const pose = poseOf(mu);
  const ends = arrowEnds(pose);
  const turn = view.poses.map(arrowEnds); // the same all round
  const reach = Math.max(...[...turn, ends].flat(2).map(Math.abs));
  const scale = 86 / Math.max(reach, POSE_ZERO); // arrows that the numbers do not show are not drawn large
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
  const isZero = pose.every((entry) => Math.abs(entry) < POSE_ZERO);
  $("pose-zero").textContent = isZero ? "Here the pose is zero to one decimal: the activation of this class alone answers. " : "";
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
  rememberSoon();
}

function selectObject(j) {
  view.object = j;
  view.poses = [];
  $("pose-title").textContent = `Pose of the class “${part.classes[j]}”`;
  updateRing();
  soon(updateView);
  rememberSoon();
}

// The mean over many sets of shapes, where it was measured.
function showStudy() {
  const { study } = part;
  if (!study) return;
  $("study").hidden = false;
  $("study").textContent = `These are five shapes of one seed. Over ${study.n} such sets they know, of the held-out views, ${studyText(study)}`;
}

function setUpView() {
  showStudy();
  $("capsules-show").textContent = ACTIVATIONS ? "activation" : "probability";
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
  const names = { capsnet: "CapsNet", cnn_pool: "CNN with pooling", capsules: "matrix capsules", cnn_matched: "CNN, as many parameters" };
  const rows = [
    ...about.digits.accuracies.map((row) => [names[row.model], `two digits: ${row.title}`, row]),
    ...part.accuracies.map((row) => [names[row.model], row.title, row]),
  ];
  for (const [model, title, { before, after }] of rows) {
    $("accuracy").tBodies[0].append(element("tr", {}, ...[model, title, percent(before, 2), percent(after, 2)].map(
      (text) => element("td", { textContent: text }))));
  }
  const { nTest, naming } = about.digits;
  $("naming").textContent = `The network was trained on pairs alone, and some capsule is always second. It is named where its drawing explains at least ${percent(naming.explains)} of the squared error that the first drawing leaves. So one digit alone is named as one in ${percent(naming.one)} of ${thousands(nTest)} test pictures, and two as two in ${percent(naming.two)} of ${thousands(nTest)}.`;
  const { run } = about.digits;
  $("provenance").textContent = `Two digits: ${run.dataset}, seed ${run.seed}, ${run.epochs} epochs,`
    + ` ${thousands(about.digits.nTest)} test pictures; the ${about.digits.nExamples} test pictures of this page are the first of them.`
    + ` Viewpoint: ${part.run.dataset}, seed ${part.run.seed}, ${part.run.epochs} epochs, ${part.nTest} held-out views with noise; this page draws without noise.`
    + ` Written by make_explorer.py at commit ${(about.commit ?? "unknown").slice(0, 12)}${about.commit?.endsWith("-dirty") ? " with changes" : ""}.`;
}

// ------------------------------------------------------------------------------------------------ 5. EM routing in a plane

// Four children vote for two parents; a vote is a point of the plane. beta_v = 0, lambda = 1.
const PLANE = { reach: 4, floor: 0.05, betaA: -4, iterations: 1, names: ["A", "B"] };
const START = [[[1.4, 1.2], [-2.6, 1.9]], [[1.8, 0.7], [0.4, -2.8]], [[1.1, 0.6], [2.6, -1.2]], [[-2.2, -1.6], [-1.3, -0.4]]];
const plane = { votes: START.flat(2), drag: null };

function planeRouting(nIters) {
  const ones = Array(nIters).fill(1);
  return Networks.emRouting(plane.votes, [1, 1, 1, 1], [PLANE.betaA, PLANE.betaA], [0, 0], ones, PLANE.floor);
}

// Which parents have an activation above a half, and why.
function activeParents(a, r) {
  const active = [0, 1].filter((j) => a[j] > 0.5);
  if (active.length !== 1) return active.length ? "Both parents are active." : "Neither parent is active.";
  const [j] = active;
  const mass = [0, 1, 2, 3].reduce((sum, i) => sum + r[2 * i + j], 0);
  return `Parent ${PLANE.names[j]} is active: ${mass.toFixed(1)} of the four children are assigned to it, and their votes lie close together.`;
}

function updatePlane() {
  const svg = $("plane");
  const { reach } = PLANE;
  const at = (x) => 180 + (170 * x) / reach;
  const { mu, sigmaSq, a, r } = planeRouting(PLANE.iterations);
  for (const [j, name] of PLANE.names.entries()) {
    const ellipse = plane.ellipses[j];
    for (const [key, value] of Object.entries({
      cx: at(mu[2 * j]), cy: at(-mu[2 * j + 1]), rx: (170 * Math.sqrt(sigmaSq[2 * j])) / reach, ry: (170 * Math.sqrt(sigmaSq[2 * j + 1])) / reach,
    })) ellipse.setAttribute(key, value.toFixed(2));
    for (let i = 0; i < 4; i++) {
      const [x, y] = plane.votes.slice(2 * (2 * i + j), 2 * (2 * i + j) + 2);
      const handle = plane.handles[2 * i + j];
      handle.setAttribute("transform", `translate(${at(x).toFixed(2)} ${at(-y).toFixed(2)})`);
      handle.firstChild.setAttribute("r", (5 + 4 * r[2 * i + j]).toFixed(2));
      handle.setAttribute("aria-label", `Vote of child ${i + 1} for ${name}: ${x.toFixed(1)}, ${y.toFixed(1)}`);
    }
  }
  const body = $("assignments").tBodies[0];
  body.replaceChildren(...[0, 1, 2, 3].map((i) => element("tr", {}, element("th", { scope: "row", textContent: i + 1 }),
    ...[0, 1].map((j) => element("td", { textContent: r[2 * i + j].toFixed(3) })))),
    element("tr", {}, element("th", { scope: "row", textContent: "activation" }), ...[0, 1].map((j) => element("td", {}, bold(a[j].toFixed(2))))));
  $("plane-value").textContent = PLANE.iterations;
  $("plane-iterations").value = PLANE.iterations;
  $("plane-text").textContent = PLANE.iterations === 1
    ? "All assignments are even. Each Gaussian is fitted to all of its four votes."
    : activeParents(a, r);
  svg.dataset.drawn = "true";
}

function setUpPlane() {
  const svg = $("plane");
  const COLOUR = ["var(--capsules)", "var(--third)"];
  shape(svg, "path", { class: "axis", d: "M10 180H350M180 10V350" });
  plane.handles = [];
  const move = (n, x, y) => {
    const within = (value) => Math.max(-PLANE.reach, Math.min(PLANE.reach, value));
    plane.votes[2 * n] = within(x);
    plane.votes[2 * n + 1] = within(y);
    soon(updatePlane);
    rememberSoon();
  };
  for (let n = 0; n < 8; n++) {
    const handle = shape(svg, "g", { tabindex: 0, role: "slider", class: "handle", "aria-valuenow": 0 });
    shape(handle, "circle", { style: `fill:${COLOUR[n % 2]};stroke:var(--card);stroke-width:1.5` });
    shape(handle, "text", { "text-anchor": "middle", y: -12, class: "strong" }, `${(n >> 1) + 1}${PLANE.names[n % 2]}`);
    handle.addEventListener("pointerdown", (event) => { svg.setPointerCapture(event.pointerId); plane.drag = n; });
    handle.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-0.2, 0], ArrowRight: [0.2, 0], ArrowUp: [0, 0.2], ArrowDown: [0, -0.2] }[event.key];
      if (!step) return;
      event.preventDefault();
      move(n, plane.votes[2 * n] + step[0], plane.votes[2 * n + 1] + step[1]);
    });
    plane.handles.push(handle);
  }
  plane.ellipses = COLOUR.map((colour) => shape(svg, "ellipse", {
    style: `fill:${colour};fill-opacity:0.15;stroke:${colour};stroke-width:2;pointer-events:none`,
  }));
  svg.addEventListener("pointermove", (event) => {
    if (plane.drag === null) return;
    const box = svg.getBoundingClientRect();
    const of = (part, length) => (((part / length) * 360 - 180) * PLANE.reach) / 170;
    move(plane.drag, of(event.clientX - box.left, box.width), -of(event.clientY - box.top, box.height));
  });
  for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => { plane.drag = null; });
  $("plane-iterations").addEventListener("input", () => {
    PLANE.iterations = Number($("plane-iterations").value);
    soon(updatePlane);
    rememberSoon();
  });
  $("plane-reset").addEventListener("click", () => { plane.votes = START.flat(2); PLANE.iterations = 1; soon(updatePlane); rememberSoon(); });
  updatePlane();
}

// ------------------------------------------------------------------------------------------------------ 6. the link, the tour

// State and drawing as `#v=1&…` in the address. A coordinate of the drawing is one of 64 letters.
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const letterOf = (x) => LETTERS[Math.max(0, Math.min(63, Math.round((63 * x) / LAYER_SIDE)))];

function drawingText() {
  return strokes.map(({ layer, points }) => {
    const pairs = points.map(({ x, y }) => letterOf(x) + letterOf(y));
    return layer + pairs.filter((pair, k) => pair !== pairs[k - 1]).join("");
  }).join(".");
}
function drawingOf(text) {
  return text.split(".").filter((word) => /^[01]([\w-]{2})+$/.test(word)).map((word) => ({
    layer: Number(word[0]),
    points: word.slice(1).match(/../g).map((pair) => {
      const [x, y] = [...pair].map((letter) => (LETTERS.indexOf(letter) * LAYER_SIDE) / 63);
      return { x, y };
    }),
  }));
}

function stateText() {
  const state = { v: 1, t: digits.iteration, e: Number(digits.even), f: Number($("fit").checked), k: dimensions.chosen ?? "",
    o: view.object, a: Math.round(view.azimuth), h: Math.round(view.elevation), r: PLANE.iterations,
    p: plane.votes.map((x) => Math.round(10 * x)).join(",") };
  state[exampleIndex >= 0 ? "x" : "d"] = exampleIndex >= 0 ? exampleIndex : drawingText();
  return new URLSearchParams(state).toString();
}

let remembering = 0;
function rememberSoon() {
  clearTimeout(remembering);
  remembering = setTimeout(() => history.replaceState(null, "", `#${stateText()}`), 300);
}

function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  const whole = (name, most, otherwise) => {
    const value = Number(state.get(name) || NaN);
    return Number.isInteger(value) && value >= 0 && value <= most ? value : otherwise;
  };
  digits.iteration = Math.max(1, whole("t", MAX_ITERATIONS, digits.iteration));
  digits.even = state.get("e") === "1";
  $("iterations").value = $("iterations-value").textContent = digits.iteration;
  $("even").checked = digits.even;
  $("fit").checked = state.get("f") !== "0";
  PLANE.iterations = Math.max(1, whole("r", 6, 1));
  const votes = (state.get("p") ?? "").split(",").map((x) => Number(x || NaN) / 10);
  if (votes.length === 16 && votes.every((x) => Math.abs(x) <= PLANE.reach)) plane.votes = votes;
  updatePlane();
  if (state.has("d")) redraw(drawingOf(state.get("d")));
  else showExample(whole("x", about.digits.labels.length - 1, undefined));
  dimensions.chosen = state.get("k") ? dimensions.digit = whole("k", classes.length - 1, 0) : null;
  view.azimuth = whole("a", 359, view.azimuth);
  const elevation = Number(state.get("h") || NaN);
  if (elevation >= -30 && elevation <= 80) view.elevation = elevation;
  const object = whole("o", part.classes.length - 1, view.object);
  document.querySelector(`input[name="object"][value="${object}"]`).checked = true;
  selectObject(object);
}

const TOUR = [
  ["#digits", "Two digits, one picture. Draw your own over each other, or take a test picture.", () => showExample(0)],
  ["#bars", "Ten capsules answer, thick bars, by their length. The thin bars are the answer of an ordinary CNN."],
  ["#tray", "Pictures on which the two networks differ. Choose one and see who is wrong."],
  ["#iterations", "Routing: from iteration to iteration the small capsules give more weight to where they agree. Move the slider, then try even couplings.",
    () => { digits.iteration = 1; $("iterations").value = $("iterations-value").textContent = 1; soon(updateAnswer); }],
  ["#dimensions", "Sixteen numbers describe a digit. Each slider moves one; the upper ones change most.",
    () => { digits.iteration = about.digits.config.iterations; $("iterations").value = $("iterations-value").textContent = digits.iteration; soon(updateAnswer); }],
  ["#viewpoint", "Turn an object to sides that neither network has seen. Which one still knows it?"],
];
function setUpTour() {
  let step = 0;
  const show = (next) => {
    step = next;
    $("tour").hidden = !TOUR[step];
    for (const marked of document.querySelectorAll(".toured")) marked.classList.remove("toured");
    if (!TOUR[step]) return;
    const [where, text, act] = TOUR[step];
    act?.();
    document.querySelector(where).classList.add("toured");
    document.querySelector(where).scrollIntoView({ block: where === "#bars" || where === "#tray" || where === "#iterations" ? "center" : "start" });
    $("tour-text").replaceChildren(bold(`${step + 1} of ${TOUR.length}. `), text);
    $("tour-next").textContent = step + 1 < TOUR.length ? "Next" : "End";
  };
  $("start-tour").addEventListener("click", () => { show(0); $("tour-next").focus(); });
  $("tour-next").addEventListener("click", () => show(step + 1));
  $("tour-back").addEventListener("click", () => show(Math.max(0, step - 1)));
  $("tour-end").addEventListener("click", () => show(TOUR.length));
  for (const link of document.querySelectorAll("a[href^='#']")) { // the address is that of the state
    link.addEventListener("click", (event) => {
      event.preventDefault();
      document.querySelector(link.getAttribute("href")).scrollIntoView();
    });
  }
  $("copy").addEventListener("click", async () => {
    history.replaceState(null, "", `#${stateText()}`);
    const holds = "Your drawing and all settings are in the part from #.";
    const elsewhere = location.protocol === "file:" ? " This page is a file on your machine: others put that part behind the address of their own copy." : "";
    try {
      await navigator.clipboard.writeText(location.href);
      $("copied").textContent = `The link is copied. ${holds}${elsewhere}`;
    } catch {
      $("copied").textContent = `Copy the address of this page. ${holds}${elsewhere}`;
    }
  });
}

// --------------------------------------------------------------------------------------------------------------- begin

async function begin() {
  const buffer = await unpack();
  const ofModel = (prefix, tensors) => Object.fromEntries(
    Object.entries(tensors).filter(([name]) => name.startsWith(prefix)).map(([name, w]) => [name.slice(prefix.length), w]));
  models.digits = tensorsOf(about.digits, buffer);
  models.pool = ofModel("pool.", models.digits);
  const tensors = tensorsOf(part, buffer);
  models.capsules = ofModel("capsules.", tensors);
  models.cnn = ofModel("cnn_matched.", tensors);
  // Engines compile what has run some times: without this the first strokes would be slower than the rest.
  const picture = models.digits.examples.slice(0, SIDE * SIDE);
  for (let k = 0; k < 3; k++) {
    Networks.capsnet(models.digits, about.digits.config, picture, MAX_ITERATIONS);
    Networks.cnnPool(models.pool, about.digits.config, picture);
  }
  setUpDrawing();
  setUpAnswer();
  setUpDimensions();
  setUpPlane();
  setUpView();
  setUpTour();
  showNumbers();
  restore();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => soon(paintDrawing));
  requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.ready = "true"; }));
}

window.explorer = { about, models, digits, dimensions, view, plane, timings, begun: begin() };
window.explorer.begun.catch((error) => {
  $("failure").hidden = false;
  $("failure").textContent = `The page could not start: ${error.message}`;
});
