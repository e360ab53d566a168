// The page: drawing, sliders, dragging, and what they show. The networks are in networks.js.
"use strict";

const $ = (id) => document.getElementById(id);
const about = JSON.parse($("about").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = [[222, 92, 200], [60, 214, 160]]; // of the two digits on black; --first and --second of the style sheet on a card
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
function ofCnn(...text) { // what a lesson without the CNN leaves out
  const node = element("span", { className: hides("cnn") ? "away" : "" }, ...text);
  node.dataset.part = "cnn";
  return node;
}
const bold = (text) => element("b", { textContent: text });
const thickness = (coupling) => Math.min(10, Math.max(0.5, 30 * coupling - 1.5)); // pixels of an arrow: 1.5 where it is even
const percent = (x, places = 1) => `${(100 * x).toFixed(places)}\u00a0%`;
// Means of both networks over many seeds, and their difference.
function studyText({ capsules, cnn, mean, low, high }) {
  const points = (x) => signed(100 * x, 2);
  const [ofCapsules, ofCnn] = apart(capsules, cnn);
  return `${ofCapsules} (capsules) and ${ofCnn} (CNN). Capsules minus CNN: ${points(mean)} percentage points, 95\u00a0% interval, not adjusted, ${points(low)} to ${points(high)}.`;
}
const hundredths = (x) => Math.round(100 * x) / 100; // of angles and votes: a link holds these exactly
const thousands = (n) => n.toLocaleString("en");
const article = (digit) => (digit === 8 ? "an" : "a");

// Calls of the same function between two frames of the screen become one.
const waiting = new Set();
function soon(update, then = (act) => act()) {
  if (waiting.has(update)) return;
  waiting.add(update);
  requestAnimationFrame(() => then(() => { waiting.delete(update); update(); }));
}
const afterPaint = (update) => soon(update, (act) => setTimeout(act));

// What a screen reader is told: once, a while after the last change; what has not been said by then goes with it. `act`: of
// another act of the person the same words are said again.
const telling = { told: {}, unsaid: {}, timer: 0, waits: false }; // waits: while a question of the tour hides its answer
const TOLD_AT_FIRST = ["answer", "verdict", "plane"]; // by the page itself, as it opens: nobody has asked
function tell(what, text, act = 0) {
  const { told } = telling;
  if ((what !== "tour" && telling.waits) || $(what)?.closest(".away")) return; // nor of what a lesson leaves out
  if (told[what]?.text === text && told[what].act === act) return;
  const first = !(what in told) && TOLD_AT_FIRST.includes(what);
  told[what] = { text, act };
  if (first) return;
  if (what === "tour") telling.unsaid = {}; // it holds what else is told
  telling.unsaid[what] = text;
  clearTimeout(telling.timer);
  const say = () => {
    if (drawing.pen) { telling.timer = setTimeout(say, 300); return; }
    const all = Object.values(telling.unsaid).join(" ");
    $("say").textContent = all === $("say").textContent ? `${all}\u00a0` : all; // another text, or it is not heard
    telling.unsaid = {};
  };
  telling.timer = setTimeout(say, 700);
}

// Two numbers with as many decimals, one at least, as tell them apart.
function apart(a, b, most = 4) {
  let places = 1;
  while (places < most && a !== b && percent(a, places) === percent(b, places)) places++;
  return [percent(a, places), percent(b, places)];
}

// With as many decimals as show on which side of the bound it is.
const beside = (x, bound, places = 1) => (places < 6 && Math.sign(x.toFixed(places) - bound) !== Math.sign(x - bound)
  ? beside(x, bound, places + 1) : x.toFixed(places));

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
    throw new Error("This browser is too old for the page: it has no DecompressionStream. Any browser of 2024 or later has.");
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

const isBrowsers = ({ altKey, ctrlKey, metaKey }) => altKey || ctrlKey || metaKey; // a key that is the browser's own
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
function onArrows(node, move) {
  node.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (!step || isBrowsers(event)) return;
    event.preventDefault();
    move(...step);
  });
}
const ZOOM = 8; // pixels of a layer for one of the network
const LAYER_SIDE = SIDE * ZOOM;
const PEN = 3 * ZOOM;
const MNIST_BOX = 20; // pixels, of the longer side of a digit
const LEAST_BOX = MNIST_BOX / 2; // a drawing that is smaller becomes a blob when it is scaled
const PALM = { wide: 180, after: 10_000 }; // CSS pixels, from which a touch is a palm's: a flat finger has up to 130; ms after a stylus in which all are
const MAX_OFFSET = 1.5; // pixels from the middle, so that two digits are no farther apart than in training
const STEPS = 4096; // of a coordinate in a link, over twice the canvas: a stroke may leave it by half a side

const layers = COLOURS.map((colour) => {
  const canvas = element("canvas", { width: LAYER_SIDE, height: LAYER_SIDE });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  Object.assign(context, { lineWidth: PEN, lineCap: "round", lineJoin: "round" });
  context.strokeStyle = context.fillStyle = `rgb(${colour})`;
  return { canvas, context, exact: null, used: false }; // exact: (36*36) of a test digit
});
const drawing = {
  layer: 0, // that the pen draws on
  strokes: [], // { layer, points: [{ x, y }, …] }, in the order in which they were drawn
  example: -1, // the test image that is shown, or -1
  last: 0, // the test image that was shown last
  kept: [true, true], // the digits of it that are
  past: [], // what Undo goes back to
  acts: 0, // strokes, and whatever else made another image
  pause: null, // timer of a pen that may rest
  penSeen: -Infinity, // ms, when a stylus was there last: a palm follows it
  pen: null, // while it is down: { id, type, from, at, begun, rests }
  other: null, // a second finger, which draws instead of a first one that rests: { id, from }
  keys: { x: LAYER_SIDE / 2, y: LAYER_SIDE / 2, down: false, shown: false },
};

// Another image, which Undo takes back.
function change(next, answer) {
  const { strokes, example, kept } = drawing;
  drawing.past = [...drawing.past.slice(-99), { strokes, example, kept }];
  redraw({ kept: [true, true], ...next }, answer);
}

function redraw(next, answer = answerSoon) {
  Object.assign(drawing, next, { pen: null, acts: drawing.acts + 1 });
  layers.forEach((layer, k) => {
    layer.context.clearRect(0, 0, LAYER_SIDE, LAYER_SIDE);
    Object.assign(layer, { exact: null, used: false });
    if (drawing.example >= 0 && drawing.kept[k]) showDigit(layer, k);
  });
  for (const { layer, points } of drawing.strokes) points.forEach((to, k) => ink(layer, points[Math.max(0, k - 1)], to));
  if (drawing.example >= 0) drawing.last = drawing.example;
  $("example").value = drawing.example < 0 ? "" : drawing.example;
  dimensions.chosen = null;
  dimensions.offsets.fill(0);
  soon(paintDrawing);
  answer();
}

function showDigit(layer, k) {
  const small = element("canvas", { width: SIDE, height: SIDE });
  const image = new ImageData(SIDE, SIDE);
  layer.exact = sourceOf(drawing.example, k);
  layer.used = true;
  layer.exact.forEach((value, at) => image.data.set([...COLOURS[k], 255 * value], 4 * at));
  small.getContext("2d").putImageData(image, 0, 0);
  layer.context.imageSmoothingEnabled = false;
  layer.context.drawImage(small, 0, 0, LAYER_SIDE, LAYER_SIDE);
}
const sourceOf = (index, k) => models.digits.examples.slice((index * 2 + k) * SIDE * SIDE, (index * 2 + k + 1) * SIDE * SIDE);

function ink(k, from, to) {
  const { context } = layers[k];
  layers[k].used = true;
  context.beginPath();
  context.moveTo(from.x, from.y);
  context.lineTo(to.x + 0.01, to.y);
  context.stroke();
}

function selectLayer(k) {
  drawing.layer = k;
  document.querySelector(`input[name="layer"][value="${k}"]`).checked = true;
}

// The pen. Its points are those that a link can hold, so that the link's image is the same one. On a test image it begins
// a new one once it moves: a tap leaves the test image as it is. In place of a digit that was cleared it draws another.
const stepOf = (x) => Math.max(0, Math.min(STEPS - 1, Math.round(((x / LAYER_SIDE + 0.5) / 2) * STEPS)));
const placeOf = (step) => ((2 * step) / STEPS - 0.5) * LAYER_SIDE;
const isFar = (a, b) => Math.hypot(a.x - b.x, a.y - b.y) >= ZOOM; // a finger that rests, or a tap, moves less
const snapped = ({ x, y }) => ({ x: placeOf(stepOf(x)), y: placeOf(stepOf(y)) });

function penDown(place, id, type) {
  drawing.pen = { id, type, from: { ...place }, at: snapped(place), begun: false, rests: true };
  drawing.other = null;
  if (isFree()) beginStroke();
}
const isFree = () => drawing.example < 0 || !drawing.kept[drawing.layer];
function beginStroke() {
  const { layer, strokes, example, kept, pen } = drawing;
  const begun = { layer, points: [pen.at] };
  change(isFree() ? { strokes: [...strokes, begun], example, kept } : { strokes: [begun], example: -1 }, underPen);
  drawing.pen = pen;
  pen.begun = true;
}
function penTo(place) {
  const { pen } = drawing;
  const to = snapped(place);
  if (isFar(place, pen.from)) pen.rests = false;
  if (Math.hypot(to.x - pen.at.x, to.y - pen.at.y) < (pen.begun ? ZOOM / 4 : ZOOM)) return;
  if (!pen.begun) beginStroke();
  const { layer, points } = drawing.strokes.at(-1);
  points.push(to);
  ink(layer, pen.at, to); // its own, where another finger has chosen the other colour
  pen.at = to;
  soon(paintDrawing); // ink first, the networks after it
  underPen();
  if (performance.now() - link.saved > 1000) remember(); // where the page is left with the pen down
}
function penUp() {
  drawing.pen = null;
  if (waiting.has(afterPause)) afterRest();
}

// Networks that take longer than two frames of the screen would hold up the ink: they wait until the pen rests or is up.
const [TWO_FRAMES, PAUSE] = [33, 100]; // ms
const answerSoon = () => afterPaint(updateDigits);
const underPen = () => (digits.took > TWO_FRAMES ? afterPause() : answerSoon());
function afterPause() {
  clearTimeout(drawing.pause);
  waiting.add(afterPause);
  drawing.pause = setTimeout(afterRest, PAUSE);
}
function afterRest() {
  clearTimeout(drawing.pause);
  waiting.delete(afterPause);
  answerSoon();
}
function penAway() { // it was a palm's
  if (drawing.pen.begun) redraw(drawing.past.pop());
  drawing.pen = null;
}

// Pixels, the longer side of what is drawn on a layer; null where nothing is, or a digit of a test image.
function boxOf(k) {
  const points = drawing.strokes.filter(({ layer }) => layer === k).flatMap((stroke) => stroke.points);
  if (layers[k].exact || !points.length) return null;
  const side = (axis) => Math.max(...points.map((point) => point[axis])) - Math.min(...points.map((point) => point[axis]));
  return (Math.max(side("x"), side("y")) + PEN) / ZOOM;
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
  context.fillStyle = "#000";
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
    context.fillText("draw a digit here", canvas.width / 2, canvas.height / 2);
  }
}

function setUpDrawing() {
  const canvas = $("draw");
  const position = (event) => {
    const box = canvas.getBoundingClientRect();
    const k = LAYER_SIDE / box.width;
    return { x: (event.clientX - box.left) * k, y: (event.clientY - box.top) * k };
  };
  const isPalm = ({ pointerType, width, height }) => pointerType === "touch"
    && (Math.max(width, height) >= PALM.wide || performance.now() - drawing.penSeen < PALM.after);
  canvas.addEventListener("pointerdown", (event) => {
    if (drawing.pen?.type === "touch" && event.pointerType === "pen") penAway();
    if (isPalm(event)) return;
    if (drawing.pen?.type === "touch" && drawing.pen.rests) drawing.other = { id: event.pointerId, from: position(event) };
    if (event.button !== 0 || (drawing.pen && drawing.pen.id !== "keys")) return; // one pointer: a palm does not join its line
    getSelection().removeAllRanges(); // a selection would be dragged instead
    canvas.setPointerCapture(event.pointerId);
    drawing.keys.shown = drawing.keys.down = false;
    penDown(position(event), event.pointerId, event.pointerType);
  });
  for (const type of ["mousedown", "dragstart", "selectstart"]) canvas.addEventListener(type, (event) => event.preventDefault());
  for (const type of ["pointerdown", "pointermove", "pointerup"]) {
    canvas.addEventListener(type, (event) => { if (event.pointerType === "pen") drawing.penSeen = performance.now(); });
  }
  canvas.addEventListener("pointermove", (event) => {
    if (drawing.pen?.rests && drawing.other?.id === event.pointerId && isFar(position(event), drawing.other.from)) {
      const { id, from } = drawing.other;
      penAway();
      penDown(from, id, "touch");
    }
    if (drawing.pen?.id !== event.pointerId) return;
    if (event.pointerType === "mouse" && !event.buttons) return penUp(); // let go where the page did not see it
    if (drawing.pen.rests && isPalm(event)) return penAway(); // which has come down: what draws is none
    const parts = event.getCoalescedEvents?.() ?? [];
    for (const part of parts.length ? parts : [event]) penTo(position(part));
  });
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
    canvas.addEventListener(end, (event) => { if (drawing.pen?.id === event.pointerId) penUp(); });
  }
  canvas.addEventListener("keydown", (event) => {
    const keys = drawing.keys;
    const within = (x) => Math.min(LAYER_SIDE - PEN / 2, Math.max(PEN / 2, x));
    if (isBrowsers(event)) return;
    if (event.key === " ") {
      if (event.repeat) return event.preventDefault();
      keys.down = !keys.down;
      if (keys.down) penDown(keys, "keys");
      else penUp();
    } else if (ARROWS[event.key]) {
      const [dx, dy] = ARROWS[event.key];
      Object.assign(keys, { x: within(keys.x + dx * ZOOM), y: within(keys.y + dy * ZOOM) });
      if (drawing.pen?.id === "keys") penTo(keys);
    } else {
      return;
    }
    keys.shown = true;
    event.preventDefault();
    soon(paintDrawing);
  });
  canvas.addEventListener("blur", () => {
    if (drawing.pen?.id === "keys") penUp();
    Object.assign(drawing.keys, { shown: false, down: false });
    soon(paintDrawing);
  });
  for (const input of document.querySelectorAll('input[name="layer"]')) {
    input.addEventListener("change", () => { drawing.layer = Number(input.value); });
  }
  $("clear").addEventListener("click", () => { if (!isEmpty()) change({ strokes: [], example: -1 }); selectLayer(0); });
  $("undo").addEventListener("click", () => { if (drawing.past.length) redraw(drawing.past.pop()); });
  $("clear-one").addEventListener("click", () => {
    if (!layers[drawing.layer].used) return;
    const kept = drawing.kept.map((is, k) => is && k !== drawing.layer);
    change({ strokes: drawing.strokes.filter(({ layer }) => layer !== drawing.layer), kept, example: kept.includes(true) ? drawing.example : -1 });
  });
  $("example").append(element("option", { value: "", textContent: "–", hidden: true })); // while a drawing is shown
  about.digits.labels.forEach((_, k) => $("example").append(element("option", { value: k, textContent: k + 1 })));
  $("example").addEventListener("change", () => showExample(Number($("example").value)));
  $("next-example").addEventListener("click", () => showExample((drawing.last + (drawing.example >= 0)) % about.digits.labels.length));
  $("fit").addEventListener("change", () => afterPaint(updateDigits));
  setUpTray();
}
const showExample = (example) => change({ strokes: [], example });

// Test images that only one of the two networks classifies correctly.
function setUpTray() {
  about.digits.labels.slice(about.digits.nExamples).forEach((labels, k) => {
    const index = about.digits.nExamples + k;
    const canvas = element("canvas", { className: "tile", width: SIDE, height: SIDE });
    const [a, b] = [0, 1].map((n) => sourceOf(index, n));
    paint(canvas, [a.map((value, at) => Math.max(value, b[at]))], [WHITE], SIDE);
    const text = `Test image ${index + 1}, ${labels[0]}, ${labels[1]}: only the ${k % 2 ? "CNN is" : "capsules are"} right`;
    const button = element("button", { type: "button", className: "pick" }, canvas, element("span", {},
      element("span", { className: `swatch ${k % 2 ? "cnn" : "capsules"}` }), `${labels[0]}, ${labels[1]}`));
    button.setAttribute("aria-label", text);
    canvas.setAttribute("aria-hidden", "true");
    button.addEventListener("click", () => { showExample(index); $("digits").scrollIntoView(); });
    $("tray").append(button);
  });
}

// -------------------------------------------------------------------------------------- 1. the capsules and their routing

const digits = {
  pictures: [], // of the two layers, (36*36) each
  image: null, // what the network sees
  result: null, // of Networks.capsnet
  cnn: [], // the CNN's probabilities
  took: 0, // ms, all that followed from the last drawing
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

// The capsule whose reconstruction resembles a layer gets the colour of this layer. One that is not found has no say.
function coloursOf(recon, pictures, isAlone) {
  const likeness = (k, l) => dot(recon[k], pictures[l]) / (Math.sqrt(dot(recon[k], recon[k]) * dot(pictures[l], pictures[l])) + 1e-9);
  const [first, second] = layers.map((layer, k) => layer.used && pictures[k].some(Boolean));
  if (!first || !second) return second && !first ? [1, 0] : [0, 1];
  const ahead = likeness(0, 0) - likeness(0, 1) + (isAlone ? 0 : likeness(1, 1) - likeness(1, 0));
  return ahead >= 0 ? [0, 1] : [1, 0];
}

// Everything that follows from the drawing.
function updateDigits() {
  const began = performance.now();
  const fit = $("fit").checked;
  const boxes = [0, 1].map(boxOf);
  digits.small = [0, 1].filter((k) => boxes[k] !== null && boxes[k] < LEAST_BOX);
  digits.isTiny = digits.small.length > 0 && !layers.some((layer, k) => layer.used && !digits.small.includes(k));
  digits.box = Math.max(...boxes); // of a tiny drawing that is alone
  const none = new Float32Array(SIDE * SIDE); // a tiny drawing beside another is left out: scaled, it would be a blob
  digits.pictures = layers.map((layer, k) => (digits.small.includes(k) && !digits.isTiny ? none : layerPicture(layer, fit)));
  const [first, second] = digits.pictures;
  digits.image = first.map((value, k) => Math.max(value, second[k])); // as in training
  const start = performance.now();
  digits.result = Networks.capsnet(models.digits, about.digits.config, digits.image, MAX_ITERATIONS);
  $("stroke-time").textContent = `${(performance.now() - start).toFixed(0)} ms`;
  digits.cnn = Networks.cnnPool(models.pool, about.digits.config, digits.image);
  digits.outline = outlineOf(digits.image);
  digits.ink = digits.image.reduce((a, b) => a + b, 0);
  digits.width = (2 * digits.ink) / (digits.outline + 1e-9);
  updateAnswer();
  paint($("seen"), [digits.image], [WHITE], SIDE);
  digits.took = performance.now() - began;
}

// Everything that follows from the number of iterations.
function updateAnswer() {
  const now = routed();
  digits.named = longest(now);
  digits.recon = digits.named.map((j) => Networks.decoder(models.digits, capsuleOf(now, j), j));
  digits.share = shareOf(digits.recon, digits.image);
  digits.found = found(now);
  digits.colour = coloursOf(digits.recon, digits.pictures, digits.found.length === 1);
  showBars(now);
  showReconstructions(now);
  showLengths();
  const first = hides("answers") ? 0 : digits.named[0]; // which would be told
  if (dimensions.chosen === null && dimensions.digit !== first) {
    dimensions.digit = first;
    dimensions.offsets.fill(0);
  }
  showFormula(now);
  showCouplings(now);
  showWalk();
  showEven();
  updateDimensions();
}

// The squared error that these reconstructions, laid over each other, leave.
const errorOf = (recon, image) => image.reduce((sum, value, k) => sum + (value - Math.max(...recon.map((picture) => picture[k]))) ** 2, 0);
const explainedBy = (recon, image) => 1 - errorOf(recon, image) / dot(image, image);
const shareOf = (recon, image) => 1 - errorOf(recon, image) / errorOf(recon.slice(0, 1), image); // of the second digit, as in make_explorer.py

// What make_explorer.py calls the evidence of no digit, one or two: `reasons` against any digit, and the digits found.
// Those of lengths were chosen for as many iterations as in training; after others the two longest are the answer.
const isRuled = () => shownIteration() === about.digits.config.iterations;
function found({ lengths }) {
  const { explains, least, explained, widest, outline, most } = about.digits.naming;
  const two = digits.share >= explains && !digits.small.length;
  const longest = outline * ($("fit").checked ? 1 : Math.max(1, digits.box / MNIST_BOX)); // as drawn, it grows with the digit
  digits.explained = explainedBy(two ? digits.recon : digits.recon.slice(0, 1), digits.image);
  digits.reasons = [
    digits.isTiny && `the drawing is ${beside(digits.box, LEAST_BOX)} of ${SIDE} pixels large, less than ${LEAST_BOX}`,
    isRuled() && lengths[digits.named[0]] < least && `the longest capsule has length ${beside(lengths[digits.named[0]], least, 3)}, less than ${least}`,
    isRuled() && digits.explained < explained && `what the capsules redraw explains ${beside(100 * digits.explained, 100 * explained).replace("-", "−")}\u00a0% of the image, less than ${percent(explained)}`,
    digits.width > widest && `the strokes of the small image are ${beside(digits.width, widest)} pixels wide (twice area over outline), more than ${widest}`,
    digits.outline > longest && `the strokes of the small image have an outline of ${beside(digits.outline, longest)} pixels, longer than ${longest.toFixed(1)}`, // many lines
    digits.ink > most && `the small image holds as much ink as ${beside(digits.ink, most)} white pixels, more than ${most}`, // a canvas that is scribbled over
  ].filter(Boolean);
  if (isEmpty() || digits.reasons.length) return [];
  return digits.named.slice(0, two || (!isRuled() && !digits.small.length) ? 2 : 1);
}

// Pixels, as shape_measures of make_explorer.py has it.
function outlineOf(image) {
  let outline = 0;
  for (let r = 1; r < SIDE; r++) {
    for (let c = 1; c < SIDE; c++) {
      const k = r * SIDE + c;
      outline += Math.hypot(image[k] - image[k - SIDE - 1], image[k - SIDE] - image[k - 1]) / Math.SQRT2;
    }
  }
  return outline;
}

const isEmpty = () => !layers.some((layer) => layer.used);

function showBars({ lengths }) {
  const empty = isEmpty();
  for (const j of classes) {
    const bar = $(`bar${j}`);
    const rank = digits.named.indexOf(j);
    ["first", "second"].forEach((name, k) => bar.classList.toggle(name, !hides("answers") && digits.found.includes(j) && digits.colour[rank] === k));
    const [length, probability] = empty ? [0, 0] : [lengths[j], digits.cnn[j]];
    bar.querySelector("i").style.width = `${100 * length}%`;
    bar.querySelector(".thin i").style.width = `${100 * probability}%`;
    bar.querySelector(".value").textContent = empty ? "" : length.toFixed(2);
    const cnnToo = hides("cnn") || bar.querySelector(".thin.asked") ? "" : `, CNN ${probability.toFixed(2)}`;
    bar.setAttribute("aria-label", `Digit ${j}${empty ? "" : `: length ${length.toFixed(2)}${cnnToo}`}`);
  }
  const [answer, cnn] = [$("answer"), $("cnn-answer")];
  if (empty) {
    answer.replaceChildren("The image is empty: draw a digit.");
    cnn.replaceChildren();
  } else {
    const ones = digits.found.map((j, k) => [k ? " and " : "", swatch(digits.colour[k]), article(j), " ", bold(j)]).flat();
    const top = [...classes].sort((i, j) => digits.cnn[j] - digits.cnn[i]).slice(0, 2);
    answer.replaceChildren(isRuled() ? "Capsules: " : `Capsules, ${digits.even ? "even couplings" : `iteration ${digits.iteration}`}: `, ...(ones.length ? ones : [bold("no digit")]), digits.found.length === 1 ? " alone. " : ". ", digits.small.length && (digits.found.length || digits.isTiny) ? `${digits.found.length ? "The other one is too small: draw" : "Draw"} it larger. ` : "", verdictOf(digits.named, digits.found.length < 2));
    cnn.replaceChildren(element("span", { className: "swatch cnn" }), "CNN, always two: ", bold(top[0]), " and ", bold(top[1]), ". ", verdictOf(top));
  }
  showWhy();
  tell("answer", `${answer.textContent}${hides("cnn") || cnn.matches(".asked") ? "" : ` ${cnn.textContent}`}`, drawing.acts);
}

// Of a whole test image: how many of its two digits are among these two, which are said where they were not.
function verdictOf(answered, said) {
  if (drawing.example < 0 || drawing.kept.includes(false)) return "";
  const right = about.digits.labels[drawing.example].filter((j) => answered.includes(j)).length;
  return `${said ? `Two longest: ${answered.join(" and ")}. ` : ""}${["Neither is right.", "One is right.", "Both are right."][right]}`;
}

function showWhy() {
  const [, b] = digits.named;
  const { naming: { explains }, labels } = about.digits;
  const [share, asked] = apart(Math.abs(digits.share), explains);
  const text = $("why-text");
  text.replaceChildren();
  if (isEmpty()) return;
  const cleared = labels[drawing.example]?.filter((_, k) => !drawing.kept[k]) ?? [];
  if (drawing.example >= 0 && !hides("answers")) text.append(`The test image was made of ${labels[drawing.example].map((j) => `${article(j)} ${j}`).join(" and ")}${cleared.length ? `; you cleared the ${cleared[0]}` : ""}. `);
  text.append(!isRuled() && !digits.reasons.length && !digits.small.length ? `Shown are the two longest capsules: no rule says how many digits there are except after ${about.digits.config.iterations} iterations of routing, as in training.` : digits.reasons.length
    ? `The capsules find no digit: ${digits.reasons.join(". Also, ")}.${hides("answers") ? "" : ` The longest are ${digits.named.join(" and ")}.`}` : digits.small.length
    ? `One drawing is ${beside(boxOf(digits.small[0]), LEAST_BOX)} of ${SIDE} pixels large, less than ${LEAST_BOX}: it is left out of the image. Scaled to the size of a digit it would be a blob.`
    : `The second redrawn digit${hides("answers") ? "" : `, ${article(b)} ${b},`} ${digits.share < 0 ? `adds ${share} to` : `removes ${share} of`} the squared error that the first leaves. ${digits.found.length === 2 ? "It is found, as it removes at least" : "It is not found, as it removes less than"} ${asked}.`);
}

// What would be answered with couplings that are all a tenth.
function showEven() {
  const text = $("even-text");
  const row = about.digits.accuracies.find(({ model, metric }) => model === "capsnet" && metric === "set_accuracy");
  const [first, last] = [digits.result.iterations[0], digits.result.iterations[digits.iteration - 1]];
  const answerOf = (iteration) => longest(iteration).map((j) => `${j} (${iteration.lengths[j].toFixed(2)})`).join(" and ");
  text.replaceChildren(digits.even ? "While couplings are even, more iterations change nothing. " : "");
  if (!isEmpty()) {
    const answers = digits.iteration === 1 ? ["The first iteration has even couplings: ", bold(answerOf(first)), ". "]
      : [`Routed, iteration ${digits.iteration}: `, bold(answerOf(last)), ". With even couplings: ", bold(answerOf(first)), ". "];
    text.append(element("span", { className: hides("answers") ? "away" : "" }, ...answers));
  }
  const [routedPart, evenPart] = apart(row.after, about.digits.evenAccuracy);
  text.append(`On ${thousands(about.digits.nTest)} test images this network classifies both digits correctly in ${routedPart} with ${about.digits.config.iterations} iterations, and in ${evenPart} with even couplings. The two longest capsules count, however short they are. The network was trained with ${about.digits.config.iterations} iterations in both cases.`);
  const { iterations } = about.registered;
  if (iterations) text.append(` Networks that were trained with three are ${iterations.mean > 0 ? "ahead of" : "behind"} those trained with one, whose couplings are even. The difference is ${Math.abs(100 * iterations.mean).toFixed(2)} percentage points (95\u00a0% interval, not adjusted, ${signed(100 * iterations.low)} to ${signed(100 * iterations.high)}, ${iterations.n} trainings of each, registered beforehand).`);
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
  showWalk();
  tell("child", $("child-text").textContent);
}

// The votes of all small capsules for one digit, each times its coupling, in the two of the sixteen numbers in which the
// votes differ most. `ends`: their sum, place by place, from 0 to s. `kept`: |s| as a part of the sum of their lengths.
function walkOf({ c, s }, j, [p, q]) {
  const { types } = about.digits.config;
  const { uHat, size } = digits.result;
  const I = size.length;
  const ends = [[0, 0]];
  let total = 0;
  for (let i = 0; i < I; i++) {
    const vote = uHat.subarray((j * I + i) * D, (j * I + i + 1) * D);
    const [x, y] = i % types ? ends.pop() : ends.at(-1);
    ends.push([x + c[j * I + i] * vote[p], y + c[j * I + i] * vote[q]]);
    total += c[j * I + i] * Math.sqrt(dot(vote, vote));
  }
  const sum = s.subarray(j * D, (j + 1) * D);
  return { ends, total, length: Math.sqrt(dot(sum, sum)) };
}
function mostVaried(j) {
  const I = digits.result.size.length;
  const variance = Array.from({ length: D }, (_, d) => {
    let [sum, square] = [0, 0];
    for (let i = 0; i < I; i++) {
      const x = digits.result.uHat[(j * I + i) * D + d];
      sum += x;
      square += x * x;
    }
    return square / I - (sum / I) ** 2;
  });
  return [...variance.keys()].sort((a, b) => variance[b] - variance[a] || a - b).slice(0, 2);
}

// The small capsules whose votes for class j are longest in these two numbers: the same ones in every iteration.
const FEW = 8;
function longestVotes(j, [p, q]) {
  const { uHat, size } = digits.result;
  const at = (i) => (j * size.length + i) * D;
  const far = Array.from(size, (_, i) => Math.hypot(uHat[at(i) + p], uHat[at(i) + q]));
  return [...far.keys()].sort((a, b) => far[b] - far[a] || a - b).slice(0, FEW);
}

function showWalk() {
  const { types } = about.digits.config;
  const j = dimensions.digit;
  const I = digits.result.size.length;
  const pair = mostVaried(j);
  const walks = digits.result.iterations.map((iteration) => walkOf(iteration, j, pair));
  const [now, even] = [walks[shownIteration() - 1], walks[0]];
  const place = Math.floor(formula.shown / types);
  const colour = digits.found.includes(j) && !hides("answers") ? `var(--${["first", "second"][digits.colour[digits.named.indexOf(j)]]})` : "var(--edge)";
  const draw = (svg, ends) => { // axes, whose names stand outside; all points and the origin are in sight, on one scale for every iteration
    const points = [[0, 0], ...ends];
    const [low, high] = [Math.min, Math.max].map((most) => [0, 1].map((d) => most(...points.map((point) => point[d]))));
    const scale = 270 / Math.max(high[0] - low[0], high[1] - low[1], 1e-6);
    const at = ([x, y]) => `${(15 + scale * (x - low[0])).toFixed(1)} ${(285 - scale * (y - low[1])).toFixed(1)}`;
    const [x0, y0] = at([0, 0]).split(" ");
    svg.replaceChildren();
    shape(svg, "path", { class: "edge", style: "stroke-width:0.75", d: `M0 ${y0}H300M${x0} 0V300` });
    shape(svg, "text", { x: 298, y: 315, "text-anchor": "end" }, `number ${pair[0] + 1} →`);
    shape(svg, "text", { x: Math.min(254, Math.max(46, x0)), y: -7, "text-anchor": "middle" }, `number ${pair[1] + 1} ↑`);
    return at;
  };
  const path = (svg, at, points, attributes) => shape(svg, "path", { d: `M${points.map(at).join("L")}`, ...attributes });
  let at = draw($("walk"), walks.flatMap(({ ends }) => ends));
  path($("walk"), at, now.ends, { class: "walk", style: `stroke:${colour}` });
  path($("walk"), at, even.ends, { class: "edge", "stroke-dasharray": "3 3" });
  path($("walk"), at, now.ends.slice(place, place + 2), { class: "walk", style: "stroke:var(--text);stroke-width:5" });
  const [cx, cy] = at(now.ends.at(-1)).split(" ");
  shape($("walk"), "circle", { cx, cy, r: 6, style: `fill:${colour}` });
  const [ofNow, ofEven] = apart(now.length / now.total, even.length / even.total);
  $("walk-text").textContent = `The ${I} votes for ${j}, each times its coupling, are laid end to end from where the axes cross, those of one place as one piece. You see two of their sixteen numbers, those that vary most. In all sixteen their lengths add up to ${now.total.toFixed(2)}; the sum s has length ${now.length.toFixed(2)}, ${ofNow} of that. With even couplings (dotted): ${ofEven}. The straighter the way, the better they agree. Bold: the chosen place.`;
  // The votes of the place that the person chose, before that the longest ones; thick where the coupling is large.
  const few = digits.child === null ? longestVotes(j, pair) : Array.from({ length: types }, (_, t) => place * types + t);
  const shown = [...few, formula.shown].map((i) => ({ end: pair.map((d) => digits.result.uHat[(j * I + i) * D + d]), width: thickness(routed().c[j * I + i]) }));
  const parent = { end: pair.map((d) => routed().v[j * D + d]), width: 3 };
  at = draw($("arrows"), [...shown, parent].map(({ end }) => end));
  const arrow = ({ end, width }, stroke, attributes = {}) => { // a line from the middle, and its head
    const [[x0, y0], [x, y]] = [[0, 0], end].map((point) => at(point).split(" ").map(Number));
    const far = Math.hypot(x - x0, y - y0) + 1e-9;
    const [u, w] = [(x - x0) / far, (y - y0) / far].map((part) => part * Math.min(7 + width, far / 2));
    shape($("arrows"), "path", { d: `M${x0} ${y0}L${x} ${y}M${x - u + w / 2} ${y - w - u / 2}L${x} ${y}L${x - u - w / 2} ${y - w + u / 2}`, class: "walk", style: `stroke:${stroke};stroke-width:${width.toFixed(2)}`, ...attributes });
    return { cx: x, cy: y };
  };
  const heads = shown.map((vote) => arrow(vote, colour));
  arrow(parent, "var(--text)", { "stroke-dasharray": "5 3" });
  shape($("arrows"), "circle", { ...heads.at(-1), r: 5, style: `fill:${colour}` });
  const which = digits.child === null ? `Shown are the ${FEW} of all ${I} votes for ${j} that are longest in these two numbers. Choose a place above to see all its votes. The dot marks the vote of the most active small capsule.` : `The ${types} votes for ${j} of the place that you chose, one of each type. The dot marks the vote of the chosen small capsule.`;
  $("arrows-text").textContent = `${which} The larger the coupling of its vote, the thicker an arrow: ${thickness(0.1)} pixels where it is a tenth, up to ${thickness(1)}. Dashed: the capsule v. ${digits.even ? "All couplings are held at a tenth." : "A coupling grows where its vote agrees with v more than the ten votes of its small capsule do on average."}`;
  $("walk-digit").value = j;
}

// One line a small capsule: where it is, its vote for the chosen digit, logit, coupling and agreement in the iteration shown.
function votesText() {
  const { side, types } = about.digits.config;
  const { size, uHat } = digits.result;
  const { logits, c, v } = routed();
  const [I, j] = [size.length, dimensions.digit];
  const lines = [["digit", "iteration", "row", "column", "type", "length", "logit", "coupling", "agreement", ...Array.from({ length: D }, (_, d) => `vote${d + 1}`)]];
  size.forEach((length, i) => {
    const vote = uHat.subarray((j * I + i) * D, (j * I + i + 1) * D);
    lines.push([j, shownIteration(), Math.floor(i / types / side) + 1, (Math.floor(i / types) % side) + 1, (i % types) + 1,
      ...[length, logits[j * I + i], c[j * I + i], dot(vote, v.subarray(j * D, (j + 1) * D)), ...vote].map((x) => Number(x.toPrecision(6)))]);
  });
  return `${lines.map((line) => line.join(",")).join("\n")}\n`;
}
function saveVotes() {
  const url = URL.createObjectURL(new Blob([votesText()], { type: "text/csv" }));
  element("a", { href: url, download: `votes_for_${dimensions.digit}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function showReconstructions({ lengths }) {
  digits.named.forEach((j, k) => {
    const colour = COLOURS[digits.colour[k]];
    const isFound = digits.found.includes(j);
    const pale = isEmpty() ? 0 : isFound ? 1 : 0.35;
    $(`recon${k}`).setAttribute("aria-label", isEmpty() ? "No reconstruction" : hides("answers") ? "A reconstruction" : `Reconstruction of ${article(j)} ${j}`);
    paint($(`recon${k}`), [digits.recon[k]], [colour.map((part) => part * pale)], SIDE);
    $(`recon${k}-text`).replaceChildren(...(isEmpty() || hides("answers") ? ["redrawn by a capsule"]
      : [swatch(digits.colour[k]), "redrawn by ", element("span", { className: "wide", textContent: "capsule " }), bold(j), `: ${isFound ? `length ${lengths[j].toFixed(2)}` : "not found"}`]));
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
  const rank = (j) => (hides("answers") ? -1 : digits.named.indexOf(j)); // else it would tell the two digits
  svg.setAttribute("aria-label", `Lengths after one to five iterations. ${(hides("answers") ? [] : digits.named).map((j) => `Digit ${j}: ${digits.result.iterations.map(({ lengths }) => lengths[j].toFixed(2)).join(", ")}`).join(". ")}`);
  shape(svg, "text", { x: left, y: top - 4 }, "length after each iteration");
  const used = []; // the lines that have a name: those in colour, and other ones that are not near the ground
  for (const j of [...classes].sort((a, b) => rank(a) - rank(b))) {
    const points = digits.result.iterations.map(({ lengths }, t) => `${x(t)} ${y(lengths[j])}`);
    const colour = rank(j) < 0 || isEmpty() ? "" : ["first", "second"][digits.colour[rank(j)]];
    shape(svg, "path", { class: `line ${colour}`, d: `M${points.join("L")}` });
    const end = digits.result.iterations[MAX_ITERATIONS - 1].lengths[j];
    if (colour || (end >= 0.25 && !hides("answers") && !isEmpty())) used.push({ j, at: y(end), colour });
  }
  used.sort((a, b) => a.at - b.at);
  used.forEach((name, k) => { if (k) name.at = Math.max(name.at, used[k - 1].at + 18); });
  for (const { j, at, colour } of used) shape(svg, "text", { x: right + 10, y: at + 4, class: colour ? "strong" : "" }, `${j}`);
}

// Nine in ten of the small capsules have a coupling to class j between the first two; the third is the largest of all.
function couplingRange(c, j) {
  const I = digits.result.size.length;
  const sorted = c.slice(j * I, (j + 1) * I).sort();
  return [0.05, 0.95, 1].map((part) => sorted[Math.round(part * (I - 1))].toFixed(3));
}

const UNDER = [60, 62, 67]; // the image under the dots, each of which has a contrast of 3 to 1 against it
function showCouplings({ c }) {
  const { side, types, kernel } = about.digits.config;
  const { size } = digits.result;
  const I = size.length;
  const fullColour = 0.2; // the preference where one coupling is 1.5 times the other
  const canvas = $("couplings");
  const context = canvas.getContext("2d");
  const k = canvas.width / SIDE;
  const grey = element("canvas", { width: SIDE, height: SIDE });
  paint(grey, [digits.image], [UNDER], SIDE);
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
  if (hides("answers")) return;
  text.append(bold("Couplings. "), "Nine in ten small capsules are coupled ");
  digits.named.forEach((j, n) => {
    const [low, high, most] = couplingRange(c, j);
    text.append(n ? ", and " : "", "to ", swatch(digits.colour[n]), bold(j), ` by ${low} to ${high} (at most ${most})`);
  });
  text.append(". In the first iteration every coupling is 0.100.");
}

function setRouting(iteration, even) {
  Object.assign(digits, { iteration, even });
  for (const slider of document.querySelectorAll("#iterations, .again")) {
    slider.disabled = even && slider.className === "again"; // what stands beside it is held at the first iteration
    slider.value = iteration;
    slider.labels[0].querySelector(".out").textContent = slider.disabled ? 1 : iteration;
  }
  $("even").checked = even;
  soon(updateAnswer);
}

const accuracyOf = (model) => about.digits.accuracies.find((row) => row.model === model && row.metric === "set_accuracy").after;

function setUpAnswer() {
  for (const j of classes) {
    const bar = element("button", { type: "button", className: "bar", id: `bar${j}` },
      element("span", { textContent: j }),
      element("span", { className: "tracks" }, element("span", { className: "track" }, element("i")),
        element("span", { className: "track thin" }, element("i"))),
      element("span", { className: "value" }));
    bar.addEventListener("click", () => chooseCapsule(j));
    bar.querySelector(".thin").dataset.part = "cnn";
    $("bars").append(bar);
    $("walk-digit").append(element("option", { value: j, textContent: j }));
  }
  $("walk-digit").addEventListener("change", () => chooseCapsule(Number($("walk-digit").value)));
  $("csv").addEventListener("click", saveVotes);
  $("trained-iterations").textContent = digits.iteration;
  $("n-types").textContent = about.digits.config.types;
  $("n-primary").textContent = about.digits.config.side ** 2 * about.digits.config.types;
  for (const slider of document.querySelectorAll("#iterations, .again")) { // in sight of all that it changes
    slider.addEventListener("input", () => setRouting(Number(slider.value), digits.even));
  }
  $("even").addEventListener("change", () => setRouting(digits.iteration, $("even").checked));
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
  onArrows(canvas, (dx, dy) => {
    const cell = Math.floor(formula.shown / types);
    chooseCell(Math.floor(cell / side) + dy, (cell % side) + dx);
  });
  const [capsules, cnn] = [accuracyOf("capsnet"), accuracyOf("cnn_pool")];
  const [capsulesPart, cnnPart] = apart(capsules, cnn);
  $("better").replaceChildren(`On ${thousands(about.digits.nTest)} test images, each of two ${about.digits.run.dataset} digits, the capsules classify both digits correctly in `, bold(capsulesPart),
    ". The CNN with pooling has as many parameters as the capsules with their decoder, and does so in ", bold(cnnPart),
    `: here ${capsules === cnn ? "both are as good" : capsules > cnn ? "the capsules are better" : "the CNN is better"}. `, about.registered.composites
      ? `Over ${about.registered.composites.n} trainings of each, registered beforehand and with settings of a search, the means are ${studyText(about.registered.composites)}`
      : "This is one training of each; the repository has many.");
}

// ------------------------------------------------------------------------------------------------- 2. sixteen dimensions

const dimensions = {
  digit: 0,
  chosen: null, // the class that the person chose; null: the longest capsule's
  offsets: new Float32Array(D),
  playing: null, // { d, start, offset } while a number is played
};
const offsetOf = (d) => (dimensions.playing?.d === d ? dimensions.playing.offset : dimensions.offsets[d]);

function chooseCapsule(j) {
  dimensions.chosen = dimensions.digit = j;
  dimensions.offsets.fill(0);
  stopPlaying();
  updateDimensions();
  showFormula(routed());
  showWalk();
}

function changedCapsule() {
  const capsule = capsuleOf(routed(), dimensions.digit);
  return capsule.map((value, d) => value + offsetOf(d));
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
  const rows = order.map((d) => $(`slider${d}`).parentNode);
  if (rows.some((row, place) => row !== $("sliders").children[place])) $("sliders").append(...rows);
  about.digits.names[j].forEach(({ name, effect }, d) => {
    const label = $(`name${d}`);
    label.replaceChildren(element("span", { className: "unseen", textContent: `Number ${d + 1}, ` }), name || "no single effect");
    label.style.color = name ? "" : "var(--soft)";
    if (name) label.append(" ", element("small", { textContent: `${signed(effect)} sd` }));
    label.title = name
      ? `From −0.25 to +0.25: ${name} changes by ${signed(effect)} standard deviations of the test digits`
      : "From −0.25 to +0.25 no measure changes by half a standard deviation of the test digits";
  });
  const now = routed();
  const length = now.lengths[j];
  $("capsule-text").textContent = length < 0.3
    ? `Capsule ${j}, length ${length.toFixed(2)}. It is short, so what it draws may mean little.`
    : `Capsule ${j}, length ${length.toFixed(2)}.`;
  const read = digits.named.includes(j) ? digits.recon[digits.named.indexOf(j)] : Networks.decoder(models.digits, capsuleOf(now, j), j);
  paint($("before"), [read], [WHITE], SIDE);
  updateSliders();
}

// The changed picture and the values beside the sliders.
function updateSliders() {
  paint($("after"), [Networks.decoder(models.digits, changedCapsule(), dimensions.digit)], [WHITE], SIDE);
  for (let d = 0; d < D; d++) {
    $(`slider${d}`).value = offsetOf(d);
    $(`slider-value${d}`).textContent = signed(offsetOf(d));
  }
}

function stopPlaying() {
  if (!dimensions.playing) return;
  const button = $(`play${dimensions.playing.d}`);
  button.setAttribute("aria-pressed", "false");
  button.textContent = "▶";
  dimensions.playing = null;
}

function play(d) {
  const same = dimensions.playing?.d === d;
  stopPlaying();
  if (!same) {
    dimensions.playing = { d, start: performance.now(), offset: 0 };
    $(`play${d}`).setAttribute("aria-pressed", "true");
    $(`play${d}`).textContent = "■";
    requestAnimationFrame(playFrame);
  }
  updateSliders();
}

function playFrame(time) {
  if (!dimensions.playing) return;
  const { start } = dimensions.playing;
  dimensions.playing.offset = Number($("range").value) * Math.sin((Math.max(0, time - start) / 2400) * 2 * Math.PI);
  updateSliders();
  requestAnimationFrame(playFrame);
}

function setRange() {
  const range = Number($("range").value);
  dimensions.offsets = dimensions.offsets.map((value) => Math.max(-range, Math.min(range, value)));
  for (let d = 0; d < D; d++) Object.assign($(`slider${d}`), { min: -range, max: range });
  updateSliders();
}

function setUpDimensions() {
  for (const j of classes) {
    const input = element("input", { type: "radio", name: "capsule", id: `pick${j}`, value: j });
    input.setAttribute("aria-label", `Digit ${j}`);
    input.addEventListener("change", () => chooseCapsule(j));
    $("picker").append(element("label", { className: "segment" }, input, element("span", { textContent: j })));
  }
  for (let d = 0; d < D; d++) {
    const input = element("input", { type: "range", id: `slider${d}`, min: -0.25, max: 0.25, step: 0.01, value: 0 });
    input.addEventListener("input", () => {
      stopPlaying();
      dimensions.chosen = dimensions.digit; // whose number it is, whichever is the longest later
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
      element("span", { className: "out", id: `slider-value${d}` }),
      button));
  }
  $("range").addEventListener("change", setRange);
  $("reset").addEventListener("click", () => { stopPlaying(); dimensions.offsets.fill(0); updateSliders(); });
}

// One pointer drags, and a second finger does not join it. `begin` gives what is dragged; null: nothing is there.
function setUpDrag(node, begin, move) {
  let [id, held] = [null, null];
  node.addEventListener("pointerdown", (event) => {
    if (id !== null || event.button !== 0 || (held = begin(event)) === null) return;
    node.setPointerCapture(event.pointerId);
    id = event.pointerId;
  });
  node.addEventListener("pointermove", (event) => {
    if (event.pointerId !== id) return;
    if (event.pointerType === "mouse" && !event.buttons) id = null; // let go where the page did not see it
    else move(event, held);
  });
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
    node.addEventListener(end, (event) => { if (event.pointerId === id) id = null; });
  }
}

// -------------------------------------------------------------------------------------------------------- 3. a viewpoint

const part = about.viewpoint;
const view = { ...part.opening };
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
  const { image, capsules, cnn } = answersAt(view.azimuth);
  paint($("small-view"), [image], [WHITE], VIEW_SIDE);
  paint($("view"), [Networks.renderVoxels(part.objects[view.object], view.azimuth, view.elevation, 128)], [WHITE], 128);
  showAnswers("answer-capsules", ACTIVATIONS ? capsules.a : Networks.softmax(capsules.scores), capsules.scores);
  showAnswers("answer-cnn", Networks.softmax(cnn), cnn);
  showVerdict(best(capsules.scores), best(cnn));
  showPose(capsules.mu);
  for (const name of ["azimuth", "elevation"]) {
    $(name).value = view[name];
    $(`${name}-value`).textContent = `${view[name]}°`;
  }
  showHand();
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
    within ? "A side within the trained range. " : `A side that ${hides("cnn") ? "they were not" : "neither network was"} trained on. `,
    `It is ${the}`, bold(truth), ": the capsules are ", bold(word(capsules)), ofCnn(", the CNN is ", bold(word(cnn))), ".");
  tell("verdict", hides("cnn") ? $("verdict").innerText : $("verdict").textContent);
}

// The pose of the object's class, as numbers.
const POSE_ZERO = 0.05; // smaller entries are shown as 0.0
const poseOf = (mu) => [...mu.slice(16 * view.object, 16 * (view.object + 1))];

function showPose(mu) {
  const pose = poseOf(mu);
  const isZero = pose.every((entry) => Math.abs(entry) < POSE_ZERO);
  $("pose-zero").textContent = isZero ? "Here the pose is zero to one decimal: the activation of this class alone answers. " : "";
  const limit = 6; // entries of this size have the full colour
  document.querySelectorAll("#matrix td").forEach((cell, k) => {
    const strength = Math.min(1, Math.abs(pose[k]) / limit);
    cell.textContent = signed(pose[k], 1);
    const colour = pose[k] < 0 ? "var(--cnn)" : "var(--capsules)";
    cell.style.background = `color-mix(in srgb, ${colour} ${Math.round(40 * strength)}%, var(--track))`;
  });
}

// The share of the pose's variance over a full turn that a sine of the azimuth explains: all of it for a matrix that is
// multiplied by the object's rotation, whose entries are a + b cos(azimuth) + c sin(azimuth).
function shareOfTurn(poses) {
  let [ofSine, all] = [0, 0];
  for (let entry = 0; entry < 16; entry++) {
    const mean = poses.reduce((sum, pose) => sum + pose[entry], 0) / poses.length;
    let [cos, sin] = [0, 0];
    poses.forEach((pose, k) => {
      const angle = (2 * Math.PI * k) / poses.length;
      cos += (pose[entry] - mean) * Math.cos(angle);
      sin += (pose[entry] - mean) * Math.sin(angle);
      all += (pose[entry] - mean) ** 2;
    });
    ofSine += (2 / poses.length) * (cos ** 2 + sin ** 2);
  }
  return ofSine / all;
}
const turnText = (poses) => (poses.flat().every((entry) => Math.abs(entry) < POSE_ZERO) ? ""
  : `Over a full turn at this elevation, trained sides or not, sines of the azimuth explain ${percent(shareOfTurn(poses), 0)} of the variance of these numbers. If the pose rotated with the object, that would be 100\u00a0%.`);

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
      shape(svg, "path", { d: arc(106 - 21 * k, from, to), "data-model": name, "data-part": k ? "cnn" : "", style: "fill:none;stroke-width:17;stroke:var(--track)" })));
  }
  for (const [azimuth, anchor, dx, dy] of [[0, "middle", 0, 12], [90, "end", -6, 4], [180, "middle", 0, -4], [270, "start", 6, 4]]) {
    const [x, y] = onRing(72, azimuth).split(" ").map(Number);
    shape(svg, "text", { x: x + dx, y: y + dy, "text-anchor": anchor }, `${azimuth}°`);
  }
  view.hand = shape(svg, "path", { style: "stroke:var(--text);stroke-width:2" });
  view.knob = shape(svg, "circle", { r: 8, style: "fill:var(--text);stroke:var(--card);stroke-width:2.5" });
  $("ring-text").append(
    "Filled: classified correctly at this azimuth, for this object and elevation. Outer ring ", element("span", { className: "swatch capsules" }),
    "capsules", ofCnn(", inner ring ", element("span", { className: "swatch cnn" }), "CNN"), `. ${part.heldOut === "azimuth" ? "Dotted: held out from the training. Between the arcs: in neither set. " : ""}`, element("span", { id: "ring-count" }));
  const turn = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 440 - CENTRE.x;
    const y = ((event.clientY - box.top) / box.height) * 290 - CENTRE.y;
    setView(Math.round((Math.atan2(x, -y) * 180) / Math.PI), view.elevation);
  };
  setUpDrag(svg, turn, turn);
}

function showHand() {
  view.hand.setAttribute("d", `M${onRing(72, view.azimuth)}L${onRing(114, view.azimuth)}`);
  const [x, y] = onRing(122, view.azimuth).split(" ");
  view.knob.setAttribute("cx", x);
  view.knob.setAttribute("cy", y);
}

// The answers all round, a few azimuths at a time so that the page stays responsive.
function updateRing() {
  const texts = [$("pose-turn"), $("ring-count")];
  for (const node of [...texts, ...view.fields.flat()]) node.style.visibility = "hidden"; // of another object or elevation
  const right = [0, 0];
  const poses = [];
  let [k, nHeldOut] = [0, 0];
  const next = () => {
    for (const stop = Math.min(k + 4, view.fields.length); k < stop; k++) {
      const azimuth = k * RING_STEP;
      const { capsules, cnn } = answersAt(azimuth);
      const unseen = part.heldOut === "azimuth" && inRange(azimuth, part.testAzimuths);
      nHeldOut += unseen;
      poses.push(poseOf(capsules.mu));
      [capsules.scores, cnn].forEach((scores, n) => {
        const isRight = best(scores) === view.object;
        right[n] += unseen && isRight;
        Object.assign(view.fields[k][n].style, { stroke: isRight ? `var(--${["capsules", "cnn"][n]})` : "var(--track)", visibility: "" });
      });
    }
    if (k < view.fields.length) {
      view.ringTimer = setTimeout(next);
      return;
    }
    $("pose-turn").textContent = turnText(poses);
    if (nHeldOut) $("ring-count").replaceChildren(`Of ${nHeldOut} held-out azimuths the capsules classify ${right[0]} correctly`, ofCnn(`, the CNN ${right[1]}`), ".");
    for (const node of texts) node.style.visibility = "";
  };
  clearTimeout(view.ringTimer);
  view.ringTimer = setTimeout(next, 100);
}

function setView(azimuth, elevation) {
  const before = view.elevation;
  view.azimuth = hundredths(((azimuth % 360) + 360) % 360) % 360;
  view.elevation = hundredths(Math.max(-30, Math.min(80, elevation)));
  if (view.elevation !== before) updateRing();
  soon(updateView);
}

function selectObject(j) {
  view.object = j;
  for (const input of document.getElementsByName("object")) input.checked = Number(input.value) === j;
  $("pose-title").textContent = `Pose of the class “${part.classes[j]}”`;
  updateRing();
  soon(updateView);
}

function openView() {
  setView(part.opening.azimuth, part.opening.elevation);
  selectObject(part.opening.object);
}

// The page opens on a chosen view; the mean over many sets of shapes stands beside it, where it was measured.
function showStudy() {
  const { study } = part;
  $("study").textContent = `The page opens with the object and elevation for which the two networks differ most in how many held-out azimuths they classify correctly: ${part.classes[part.opening.object]} at elevation ${part.opening.elevation}°. Elevations from ${part.run.config.test_elevations.join("° to ")}° were tried in steps of 10°. That is no average. ${study
    ? `These are five shapes of one seed. Over ${study.n} such sets the means on held-out views are ${studyText(study)}` : ""}`;
}

function setUpView() {
  showStudy();
  $("capsules-show").textContent = ACTIVATIONS ? "activation" : "probability";
  part.classes.forEach((name, j) => {
    const input = element("input", { type: "radio", name: "object", value: j, checked: j === view.object });
    input.addEventListener("change", () => { selectObject(j); });
    const small = element("canvas", { className: "tile", width: VIEW_SIDE, height: VIEW_SIDE }); // what an answer speaks of
    small.setAttribute("aria-hidden", "true");
    const middle = (part.trainAzimuths[0] + part.trainAzimuths[1]) / 2;
    paint(small, [Networks.renderVoxels(part.objects[j], middle, part.trainElevations[0], VIEW_SIDE)], [WHITE], VIEW_SIDE);
    $("objects").append(element("label", { className: "segment" }, input, element("span", {}, small, name)));
  });
  for (const id of ["answer-capsules", "answer-cnn"]) {
    for (const name of part.classes) {
      $(id).append(element("div", { className: "small-bar" }, element("span", { textContent: name }),
        element("span", { className: "track" }, element("i")), element("span", { className: "value" })));
    }
  }
  $("trained-elevations").textContent = part.trainElevations.map((angle) => `${angle}°`).join(" to ");
  for (let r = 0; r < 4; r++) $("matrix").tBodies[0].append(element("tr", {}, ...[0, 1, 2, 3].map(() => element("td"))));
  setUpRing();
  const canvas = $("view");
  setUpDrag(canvas, ({ clientX: x, clientY: y }) => ({ x, y, azimuth: view.azimuth, elevation: view.elevation }), (event, from) => {
    const perPixel = 180 / canvas.getBoundingClientRect().width;
    setView(Math.round(from.azimuth + (event.clientX - from.x) * perPixel), Math.round(from.elevation + (event.clientY - from.y) * perPixel));
  });
  onArrows(canvas, (dx, dy) => setView(view.azimuth + 5 * dx, view.elevation + 5 * dy));
  for (const id of ["azimuth", "elevation"]) {
    $(id).addEventListener("input", () => setView(...["azimuth", "elevation"].map((name) => (name === id ? Number($(id).value) : view[name]))));
  }
}

// ------------------------------------------------------------------------------------------------------- 4. the numbers

const commitText = (commit) => `${(commit ?? "unknown").slice(0, 12)}${commit?.endsWith("-dirty") ? " with changes" : ""}`;
function showNumbers() {
  const names = { capsnet: "CapsNet", cnn_pool: "CNN with pooling", capsules: "matrix capsules", cnn_matched: "CNN, as many parameters" };
  const tests = { set_accuracy: "images of two digits: both are right", digit_accuracy: "the digits of these images, each one alone",
    familiar_accuracy: "views of the training range", held_out_accuracy: "held-out views" };
  for (const { model, metric, before, after, changed } of [...about.digits.accuracies, ...part.accuracies]) {
    const row = element("tr", {}, ...[names[model], tests[metric], percent(before, 2), percent(after, 2), changed ?? "–"].map(
      (text) => element("td", { textContent: text })));
    if (model.startsWith("cnn")) row.dataset.part = "cnn";
    $("accuracy").tBodies[0].append(row);
  }
  const { nTest, naming } = about.digits;
  $("naming").textContent = `The network was trained on pairs alone, and some capsule is always the second longest. So the page redraws the longest one's digit, and then the second's too. A second digit is found only where that removes at least ${percent(naming.explains)} of the squared error that is left.`
    + ` There are six reasons to find no digit at all. The drawing is smaller than half a digit of the training, ${LEAST_BOX} pixels. The longest capsule is below ${naming.least}, or less than ${percent(naming.explained)} of the image is explained. Strokes are wider than ${naming.widest} pixels, their outline is longer than ${naming.outline}, or there is more ink than ${naming.most} white pixels. A large drawing that is not scaled may have a longer outline.`
    + ` All but the first were chosen on ${thousands(naming.nChoice)} pairs of training digits, one laid over the other, and as many single ones. Of ${thousands(nTest)} test images of one digit they give one digit, right or wrong, in ${percent(naming.one)}. Of ${thousands(nTest)} of two they give two in ${percent(naming.two)}.`;
  $("naming").append(ofCnn(" These rules are the page's own, and for the capsules alone. The CNN has none: its two likeliest digits stand there even where nothing is drawn but a dot."));
  const { run } = about.digits;
  $("provenance").textContent = `Two digits: ${run.dataset}, seed ${run.seed}, ${run.epochs} epochs,`
    + ` ${thousands(about.digits.nTest)} test images; test images 1 to ${about.digits.nExamples} of this page are the first of them.`
    + ` Viewpoint: ${part.run.dataset}, seed ${part.run.seed}, ${part.run.epochs} epochs, ${part.nTest} held-out views with noise; this page draws without noise.`
    + ` make_explorer.py took the networks, and their accuracy as trained, at commit ${commitText(about.commit)}.`
    + ` It measured the rest at commit ${commitText(about.measuredCommit ?? about.commit)}, and wrote text and scripts at commit ${commitText(about.pageCommit)}.`;
}

// ------------------------------------------------------------------------------------------------ 5. EM routing in a plane

// Four children vote for two parents; a vote is a point of the plane. beta_v = 0, lambda = 1.
const PLANE = { reach: 4, floor: 0.05, betaA: -4, iterations: 1, names: ["A", "B"] };
const START = [[[1.4, 1.2], [-2.6, 1.9]], [[1.8, 0.7], [0.4, -2.8]], [[1.1, 0.6], [2.6, -1.2]], [[-2.2, -1.6], [-1.3, -0.4]]];
const plane = { votes: START.flat(2) };

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
  return `Parent ${PLANE.names[j]} is active: ${mass.toFixed(1)} of the four children are assigned to it, and the ellipse of their votes is small.`;
}

function updatePlane() {
  const svg = $("plane");
  const { reach } = PLANE;
  const at = (x) => 180 + (170 * x) / reach;
  const { mu, sigmaSq, a, r } = planeRouting(PLANE.iterations);
  for (const [j, name] of PLANE.names.entries()) {
    const ellipse = plane.ellipses[j];
    const [cx, cy, rx, ry] = [at(mu[2 * j]), at(-mu[2 * j + 1]), ...[0, 1].map((d) => (170 * Math.sqrt(sigmaSq[2 * j + d])) / reach)];
    for (const [key, value] of Object.entries({ cx, cy, rx, ry })) ellipse.setAttribute(key, value.toFixed(2));
    const votes = plane.handles.map((_, n) => [at(plane.votes[2 * n]), at(-plane.votes[2 * n + 1]) - 8]); // and their names
    const far = ([x, y]) => Math.min(...votes.map((vote) => Math.hypot((x - vote[0]) / 2, y - 5 - vote[1])));
    const sides = [[cx, cy + ry + 17], [cx, cy - ry - 8], [cx + rx + 35, cy + 5], [cx - rx - 35, cy + 5]]
      .map(([x, y]) => [Math.max(35, Math.min(325, x)), Math.max(15, Math.min(352, y))]);
    const [x, y] = sides.reduce((a, b) => (far(b) > far(a) ? b : a)); // beside the ellipse, away from the votes
    plane.letters[j].setAttribute("x", x.toFixed(2));
    plane.letters[j].setAttribute("y", y.toFixed(2));
    for (let i = 0; i < 4; i++) {
      const [x, y] = plane.votes.slice(2 * (2 * i + j), 2 * (2 * i + j) + 2);
      const handle = plane.handles[2 * i + j];
      handle.setAttribute("transform", `translate(${at(x).toFixed(2)} ${at(-y).toFixed(2)})`);
      handle.firstChild.setAttribute("r", (5 + 4 * r[2 * i + j]).toFixed(2));
      handle.setAttribute("aria-valuenow", x.toFixed(1));
      handle.setAttribute("aria-valuetext", `${signed(x, 1)}, ${signed(y, 1)}, assigned ${r[2 * i + j].toFixed(2)}`);
    }
  }
  // What the M-step has computed of each parent, with beta_v = 0 and lambda = 1: networks.js has the same in one line.
  const mass = [0, 1].map((j) => [0, 1, 2, 3].reduce((sum, i) => sum + r[2 * i + j], 0));
  const costs = [0, 1].map((j) => [0, 1].map((d) => 0.5 * Math.log(sigmaSq[2 * j + d]) * mass[j]));
  const row = (name, cells) => element("tr", {}, element("th", { scope: "row", textContent: name }), ...cells.map((cell) => element("td", {}, cell)));
  const pairOf = (x, places = 2) => `${signed(x[0], places)}, ${signed(x[1], places)}`;
  $("assignments").tBodies[0].replaceChildren(
    ...[0, 1, 2, 3].map((i) => row(`child ${i + 1}`, [0, 1].map((j) => r[2 * i + j].toFixed(3)))),
    row("sum R", mass.map((m) => m.toFixed(3))),
    row("mean μ", [0, 1].map((j) => pairOf(mu.slice(2 * j, 2 * j + 2)))),
    row("variance σ²", [0, 1].map((j) => pairOf(sigmaSq.slice(2 * j, 2 * j + 2), 5).replaceAll("+", ""))),
    row("cost", costs.map((cost) => pairOf(cost, 3))),
    row("activation a", [0, 1].map((j) => bold(a[j].toFixed(3)))));
  const shown = costs.map((pair) => pair.map((cost) => Number(cost.toFixed(3)))); // so that what is shown adds up
  $("plane-equation").replaceChildren(...[0, 1].map((j) => element("span", {},
    `a(${PLANE.names[j]}) = sigmoid(β − costs) = sigmoid(${signed(PLANE.betaA, 0)} ${signed(-shown[j][0], 3)} ${signed(-shown[j][1], 3)}) = sigmoid(${signed(PLANE.betaA - shown[j][0] - shown[j][1], 3)}) = ${a[j].toFixed(3)}`,
    element("br"))), `A cost is ln σ times R, the sum of a parent's assignments, for each of the two numbers of a vote. Votes close together cost little, or less than nothing. β is ${signed(PLANE.betaA, 0)} here, and ${PLANE.floor} is added to each variance.`);
  $("plane-value").textContent = PLANE.iterations;
  $("plane-iterations").value = PLANE.iterations;
  $("plane-text").textContent = PLANE.iterations === 1
    ? `All assignments are even. ${activeParents(a, r)}`
    : activeParents(a, r);
  tell("plane", $("plane-text").textContent);
}

function setPlane(votes, iterations) {
  plane.votes = votes;
  PLANE.iterations = iterations;
  updatePlane();
}

function setUpPlane() {
  const svg = $("plane");
  const COLOUR = ["var(--capsules)", "var(--third)"];
  const FINGER = 0.5; // of the plane, some 20 pixels on a phone
  shape(svg, "path", { class: "axis", d: "M10 180H350M180 10V350" });
  plane.ellipses = COLOUR.map((colour, n) => shape(svg, "ellipse", {
    style: `fill:${colour};fill-opacity:0.15;stroke:${colour};stroke-width:2;pointer-events:none`, ...(n ? { "stroke-dasharray": "8 4" } : {}),
  }));
  plane.letters = PLANE.names.map((name) => shape(svg, "text", { "text-anchor": "middle", class: "strong" }, `parent ${name}`));
  plane.handles = [];
  const move = (n, x, y) => {
    const within = (value) => hundredths(Math.max(-PLANE.reach, Math.min(PLANE.reach, value)));
    plane.votes[2 * n] = within(x);
    plane.votes[2 * n + 1] = within(y);
    soon(updatePlane);
  };
  for (let n = 0; n < 8; n++) {
    const handle = shape(svg, "g", { tabindex: 0, role: "slider", class: "handle", "aria-valuemin": -PLANE.reach, "aria-valuemax": PLANE.reach, "aria-label": `Vote of child ${(n >> 1) + 1} for ${PLANE.names[n % 2]}` });
    shape(handle, "circle", { style: `fill:${COLOUR[n % 2]};stroke:var(--card);stroke-width:1.5` });
    shape(handle, "text", { "text-anchor": "middle", y: -12, class: "strong" }, `${(n >> 1) + 1}${PLANE.names[n % 2]}`);
    onArrows(handle, (dx, dy) => move(n, plane.votes[2 * n] + 0.2 * dx, plane.votes[2 * n + 1] - 0.2 * dy));
    plane.handles.push(handle);
  }
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    const of = (part, length) => (((part / length) * 360 - 180) * PLANE.reach) / 170;
    return [of(event.clientX - box.left, box.width), -of(event.clientY - box.top, box.height)];
  };
  setUpDrag(svg, (event) => { // the nearest vote, since a finger is wider than a dot
    const [x, y] = at(event);
    const far = plane.handles.map((_, n) => Math.hypot(plane.votes[2 * n] - x, plane.votes[2 * n + 1] - y));
    const n = far.indexOf(Math.min(...far));
    if (far[n] > FINGER) return null;
    event.preventDefault(); // no selection of text
    return n;
  }, (event, n) => move(n, ...at(event)));
  $("plane-iterations").addEventListener("input", () => {
    PLANE.iterations = Number($("plane-iterations").value);
    soon(updatePlane);
  });
  $("plane-reset").addEventListener("click", () => setPlane(START.flat(2), 1));
}

// ------------------------------------------------------------------------------------------------------ 6. the link

// Everything that a person has set, as `#v=2&…&z=checksum`. A coordinate of the drawing is two of 64 letters.
const VERSION = 2;
const KEYS = "v s c t e f k i g n o a h r p big only hide w x m d z".split(" ");
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const SECTIONS = [...document.querySelectorAll("section")].map(({ id }) => id);
const PARTS = new Set([...document.querySelectorAll("[data-part]")].flatMap((e) => e.dataset.part.split(" ")));
const DETAILS = [...document.querySelectorAll("details")].map(({ id }) => id); // explanations that open
const lesson = { only: [], hide: [] }; // sections and parts, by name
const hides = (part) => lesson.hide.includes(part);
const link = { damaged: false, held: false, timer: 0, saved: 0, shown: 0, copied: null, copies: 0 }; // copied: the section whose link was copied, until the page is scrolled

function drawingText() {
  const letters = (x) => LETTERS[stepOf(x) >> 6] + LETTERS[stepOf(x) & 63];
  return drawing.strokes.map(({ layer, points }) => layer + points.map(({ x, y }) => letters(x) + letters(y)).join("")).join(".");
}
function drawingOf(text) {
  if (!/^([01]([\w-]{4})+(\.(?=.)|$))*$/.test(text)) return null;
  const place = (letters) => placeOf(64 * LETTERS.indexOf(letters[0]) + LETTERS.indexOf(letters[1]));
  return text.split(".").filter(Boolean).map((word) => ({
    layer: Number(word[0]),
    points: word.slice(1).match(/.{4}/g).map((four) => ({ x: place(four), y: place(four.slice(2)) })),
  }));
}
function checksum(text) {
  let sum = 7;
  for (const letter of text) sum = (31 * sum + letter.charCodeAt(0)) % 4093;
  return sum.toString(36);
}

function showParts() {
  for (const e of document.querySelectorAll("[data-part]")) e.classList.toggle("away", e.dataset.part.split(" ").some(hides));
}

// The section whose heading was passed last; at the end of the page the last one, whose heading may not get so far.
function sectionInSight() {
  const shown = SECTIONS.filter((id) => $(id).offsetParent);
  const isEnd = scrollY > 0 && scrollY + innerHeight > document.documentElement.scrollHeight - 2;
  return shown.findLast((id) => isEnd || $(id).getBoundingClientRect().top < innerHeight / 3) ?? SECTIONS[0];
}

function stateText() {
  const offsets = [...dimensions.offsets].map((x) => Math.round(100 * x));
  const state = {
    v: VERSION, s: link.copied ?? sectionInSight(), c: drawing.layer, t: digits.iteration, e: Number(digits.even), f: Number($("fit").checked),
    k: dimensions.chosen ?? "", i: digits.child ?? "", g: $("range").value,
    n: offsets.some(Boolean) ? offsets.join(",") : "",
    o: view.object, a: view.azimuth, h: view.elevation, r: PLANE.iterations,
    p: plane.votes.map((x) => Math.round(100 * x) / 10).join(","), big: Number($("big").checked), only: lesson.only.join(","), hide: lesson.hide.join(","),
    w: DETAILS.filter((id) => $(id).open).join(","),
  };
  if (drawing.example >= 0) Object.assign(state, { x: drawing.example + 1, m: drawing.kept.map(Number).join("") });
  if (drawing.example < 0 || drawing.strokes.length) state.d = drawingText();
  for (const [key, value] of Object.entries(state)) if (value === "" && key !== "d") delete state[key];
  const text = new URLSearchParams(state).toString().replaceAll("%2C", ",");
  return `${text}&z=${checksum(text)}`;
}

// After whatever a person does. A damaged link stays in the address until then.
function remember() {
  const text = `#${stateText()}`;
  const isTour = "tour" in document.documentElement.dataset; // which gives back what was before
  link.saved = performance.now();
  if (!link.damaged && !isTour && text !== location.hash) history.replaceState(null, "", text);
}
function rememberSoon() {
  clearTimeout(link.timer);
  link.timer = setTimeout(() => {
    remember();
    if (!link.damaged && !link.held && !drawing.pen) $("failure").hidden = true; // nothing moves under a pen
  }, 300);
}

// The state of a link, from the text after its #. What is not in it is as at the beginning.
function restore(text = location.hash.slice(1), isPasted = false) {
  for (let k = 0; k < 3 && /%(25)*(3d|26)/i.test(text); k++) { // encoded, once or more often
    text = text.replace(/%[0-9a-f]{2}/gi, (code) => String.fromCharCode(parseInt(code.slice(1), 16)));
  }
  text = text.replace(/^(?:#|%23)+/i, "").replace(/&(?:amp|#38);/g, "&"); // of a page's source
  text = text.replace(/(?:[\s.,;:!?)\]}>*"'”’»]|%20|%22|%27|%3e|&gt;|&quot;|%[89a-f][0-9a-f])+$/i, ""); // of the sentence in which it stood: an address holds ” as %E2%80%9D
  text = text.replace(/\s|%(25)*(0[9ad]|20)/gi, ""); // of a wrapped line, or after a comma
  if (SECTIONS.includes(text)) text = `s=${text}`;
  const state = new URLSearchParams(text);
  const wrong = [];
  const read = (key, parse, otherwise) => {
    if (!state.has(key)) return otherwise;
    const value = parse(state.getAll(key).at(-1));
    if (value !== null) return value;
    wrong.push(key);
    return otherwise;
  };
  const whole = (low, high) => (word) => (/^-?\d+$/.test(word) && word >= low && word <= high ? Number(word) : null);
  const decimal = (low, high) => (word) => (/^-?\d+(\.\d+)?$/.test(word) && word >= low && word <= high ? hundredths(word) : null);
  const numbers = (n, most, parse = whole) => (word) => {
    const list = word.split(",").map(parse(-most, most));
    return list.length === n && !list.includes(null) ? list : null;
  };
  const words = (known) => (word) => {
    const list = word.split(",").filter(Boolean);
    return list.every((name) => known.includes(name)) ? list : null;
  };
  const isOther = /^\d+$/.test(state.get("v")) && state.get("v") !== String(VERSION);
  if (isOther) for (const key of [...state.keys()]) state.delete(key);

  stopPlaying();
  clearTimeout(telling.timer);
  telling.unsaid = {}; // of the state before: this one may hide it
  lesson.only = read("only", words(SECTIONS), []);
  lesson.hide = read("hide", words([...PARTS]), []);
  for (const id of SECTIONS) $(id).classList.toggle("lone", lesson.only.includes(id));
  for (const id of SECTIONS) $(id).classList.toggle("away", lesson.only.length > 0 && !lesson.only.includes(id));
  showParts();
  for (const e of document.querySelectorAll("main a[data-to]")) { // to a section that is away: plain text
    if ($(e.dataset.to).classList.contains("away")) e.removeAttribute("href");
    else e.href = `#${e.dataset.to}`;
  }
  for (const e of document.querySelectorAll("nav a")) e.classList.toggle("away", $(e.hash.slice(1)).classList.contains("away"));
  const opened = read("w", words(DETAILS), []);
  for (const id of DETAILS) $(id).open = opened.includes(id);
  $("big").checked = read("big", whole(0, 1), 0) === 1;
  setType();
  selectLayer(read("c", whole(0, 1), 0));
  setRouting(read("t", whole(1, MAX_ITERATIONS), about.digits.config.iterations), read("e", whole(0, 1), 0) === 1);
  $("fit").checked = read("f", whole(0, 1), 1) === 1;
  const votes = read("p", numbers(16, 10 * PLANE.reach, decimal), START.flat(2).map((x) => 10 * x)).map((x) => hundredths(x / 10));
  setPlane(votes, read("r", whole(1, 6), 1));
  const keys = [...state.keys()];
  for (const other of ["d", "m"]) if (keys.lastIndexOf("x") > keys.lastIndexOf(other)) state.delete(other); // a teacher's, last
  const strokes = read("d", drawingOf, null);
  const kept = read("m", (word) => (/^(01|10|11)$/.test(word) ? [...word].map((one) => one === "1") : null), [true, true]);
  const isBoth = state.has("x") && strokes?.every(({ layer }) => !kept[layer]); // strokes in place of a cleared digit
  const example = strokes && !isBoth ? -1 : read("x", whole(1, about.digits.labels.length), 1) - 1;
  digits.child = read("i", whole(0, about.digits.config.side ** 2 * about.digits.config.types - 1), null);
  change({ strokes: strokes ?? [], example, kept });
  dimensions.chosen = read("k", whole(0, classes.length - 1), null);
  if (dimensions.chosen !== null) dimensions.digit = dimensions.chosen;
  $("range").value = read("g", (word) => (["0.25", "0.5", "1"].includes(word) ? word : null), "0.25");
  updateDigits();
  dimensions.offsets = Float32Array.from(read("n", numbers(D, 100), Array(D).fill(0)), (x) => x / 100);
  if (dimensions.offsets.some(Boolean)) dimensions.chosen = dimensions.digit;
  setRange();
  view.azimuth = read("a", decimal(0, 359.99), part.opening.azimuth);
  view.elevation = read("h", decimal(-30, 80), part.opening.elevation);
  selectObject(read("o", whole(0, part.classes.length - 1), part.opening.object));
  wrong.push(...[...state.keys()].filter((key) => !KEYS.includes(key)));
  const shown = SECTIONS.find((id) => !$(id).classList.contains("away")); // the order of "only" is the link's
  const first = isPasted ? shown : null; // where what it shows begins
  const asked = read("s", (word) => (SECTIONS.includes(word) ? word : null), first);
  const section = asked && $(asked).classList.contains("away") ? shown : asked;
  link.copied = null;
  $("copied").hidden = true;

  const isCut = (state.has("v") || state.has("z")) && checksum(text.replaceAll(/%2c/gi, ",").split("&z=")[0]) !== state.get("z");
  link.damaged = isOther || isCut || wrong.length > 0;
  $("failure").hidden = !link.damaged;
  $("failure").textContent = isOther
    ? "This link is of another version of this page, which cannot read it. The page is shown as it opens."
    : `This link is damaged or incomplete.${["d", "x", "m"].some((key) => wrong.includes(key)) ? " Its image cannot be read." : isCut && !state.has("d") && !state.has("x") ? " Its image is missing." : ""}${wrong.includes("only") ? ` “only” takes ${SECTIONS.join(", ")}.` : ""}${wrong.includes("hide") ? ` “hide” takes ${[...PARTS].join(", ")}.` : ""} What could be read is shown.`;
  if (link.damaged) scrollTo(0, 0); // where this is said
  else if (section) {
    goTo(section, "instant");
    afterPaint(() => scrollToSection(section, "instant")); // where the page was still scrolling
  }
}

function setType() {
  document.documentElement.toggleAttribute("data-big", $("big").checked);
}

// What a person has chosen in a section, if anything.
function choiceOf(id) {
  if (id === "digits" && dimensions.chosen !== null) return $(`bar${dimensions.chosen}`);
  if (id === "routing" && digits.child !== null) return $("couplings");
  if (id === "routing" && dimensions.chosen !== null) return document.querySelector(".agreement"); // with its heading
  if (id === "dimensions") return [...$("sliders").children].find((_, d) => dimensions.offsets[d]) ?? $("picker"); // the topmost
  return { em: $("plane"), viewpoint: $("view") }[id];
}

// To a section: its heading in sight, and the next Tab begins there. What is chosen in the section is in sight too, and
// the heading where both find room.
function goTo(id, behavior = "auto") {
  scrollToSection(id, behavior);
  $(`${id}-title`).focus({ preventScroll: true });
}
function scrollToSection(id, behavior) {
  (id === SECTIONS[0] ? document.body : $(`${id}-title`)).scrollIntoView({ behavior });
  if (behavior === "instant") choiceOf(id)?.scrollIntoView({ behavior, block: "nearest" });
}

const CONTROLS = "canvas, svg, input, select, button, summary, label, a[href]";
const PASSING = ["Tab", "Shift", "Control", "Alt", "Meta"]; // keys that change nothing

function setUpLink() {
  for (const anchor of document.querySelectorAll("a[href^='#']")) { // the address is that of the state
    anchor.dataset.to = anchor.hash.slice(1);
    anchor.addEventListener("click", (event) => {
      event.preventDefault();
      if (anchor.hash) goTo(anchor.dataset.to);
    });
  }
  for (const id of SECTIONS) {
    const button = element("button", { type: "button", className: "copy", textContent: "Copy link" });
    button.setAttribute("aria-label", `Copy link to “${$(`${id}-title`).textContent}”`);
    button.addEventListener("click", () => copyLink(id));
    $(`${id}-title`).after(button);
  }
  addEventListener("scroll", () => { link.copied = null; });
  addEventListener("hashchange", ({ newURL }) => { link.closeTour(); restore(new URL(newURL).hash.slice(1), true); });
  for (const type of ["pointerdown", "keydown"]) {
    addEventListener(type, ({ target, key }) => {
      $("copied").hidden = true;
      if (target.closest?.(CONTROLS) && !PASSING.includes(key)) link.damaged = false;
    }, true);
  }
  addEventListener("pointerdown", () => { link.held = true; }, true);
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => { link.held = false; }, true);
  for (const type of ["input", "click", "keyup", "scroll"]) addEventListener(type, rememberSoon);
  for (const end of ["pointerup", "pointercancel"]) { // at once, too: a stroke is not lost where the page is left
    for (const save of [remember, rememberSoon]) addEventListener(end, save);
  }
  for (const id of DETAILS) $(id).addEventListener("toggle", rememberSoon);
  $("big").addEventListener("change", setType);
  $("section-names").textContent = SECTIONS.join(", ");
  $("part-names").textContent = [...PARTS].join(", ");
}

const SAID = 8000; // ms that the line about a copied link stays
async function copyLink(id) {
  link.copied = id;
  clearTimeout(link.shown);
  link.shown = setTimeout(() => { $("copied").hidden = true; }, SAID);
  const text = `#${stateText()}`;
  const isTour = "tour" in document.documentElement.dataset;
  if (!isTour) history.replaceState(null, "", text); // else that of before it
  const holds = `The link holds ${drawing.example < 0 ? (drawing.strokes.length ? "your drawing" : "an empty canvas") : `this test image${drawing.strokes.length ? " with your drawing" : ""}`}, every setting and the section “${$(`${id}-title`).textContent}”.`;
  const elsewhere = location.protocol === "file:" ? " Your page is a file: others put the part from # behind the address of their own copy." : "";
  $("copied").hidden = false;
  try {
    await navigator.clipboard.writeText(new URL(text, location.href).href);
    $("copied").textContent = `Copied. ${holds}${elsewhere}`;
  } catch {
    $("copied").textContent = isTour ? "Nothing is copied: the browser does not allow it. The address is that of before the tour: close the tour, and copy again."
      : `Copy the address of this page. ${holds}${elsewhere}`;
  }
  tell("copied", $("copied").textContent, ++link.copies);
}

// ------------------------------------------------------------------------------------------------------ 7. the tour

// Of each step: what its question speaks of, and its answer, if that is another; which parts it needs besides; the control that
// Tab comes to next, if it is another; what is hidden until it is answered, in the steps before it too; what is done before the
// question, and before the answer; where the box stands, if not on the right.
const TOUR = [
  { about: "draw", place: "left", needs: "answers", hidden: "#answer, #cnn-answer, .bar, #tray", before: showFirst,
    question: "This image holds two digits, one over the other. Which two do you see?",
    answer: () => `${$("answer").textContent} A capsule is a small group of numbers for one thing. Its length should say whether the thing is there.` },
  { about: "bars", next: "bar0", needs: "cnn answers", hidden: "#cnn-answer, .bar .thin, #tray", before: showFirst,
    question: "A plain CNN looks at the same image. Will it classify both digits correctly, as the capsules do?",
    answer: () => `No: the thin bars are its probabilities, and the two highest are not both right. Over all test images ${accuracyOf("cnn_pool") > accuracyOf("capsnet") ? "the CNN is right more often" : "the capsules are right more often"}${hides("tray") ? "" : ": see “Where the two differ” below"}.` },
  { about: "recons", next: "next-example", place: "middle", hidden: "#recons figure", before: showFirst,
    question: "From sixteen numbers a capsule can redraw its digit. Will each redrawn image hold one digit or both?",
    answer: "One each here, in the colours of the digits. “Next” shows other test images, not all of which come apart." },
  { about: "iterations", place: "left", hidden: "#lengths, #even-text", before: () => { if (isEmpty()) showExample(about.digits.nExamples); setRouting(1, false); }, reveal: () => setRouting(about.digits.config.iterations, false),
    question: "Small capsules vote for the digits. What happens when votes that agree count more?",
    answer: grownText },
  { about: "sliders",
    question: "Sixteen numbers describe a digit. What will one of them change?",
    reveal: () => play(Number($("sliders").querySelector("input").id.slice("slider".length))),
    answer: "The number of the first slider goes up and down, and the digit changes with it. The name beside each slider was measured." },
  { about: "plane", then: "plane-text", next: "plane-iterations", before: () => setPlane(START.flat(2), 1), reveal: () => setPlane(START.flat(2), 3),
    question: "Another routing, EM, fits a Gaussian to votes. Which parent has votes that lie close together?",
    answer: "Parent A: after three iterations three of the four children are assigned to it. The slider shows each iteration." },
  { about: "view", then: "ring", place: "left", needs: "cnn answers", before: openView, hidden: "#verdict, #viewpoint .small-bars, #ring, #ring-text",
    question: "An object from a side that neither network has seen. Which network classifies it correctly?",
    answer: "The sentence below the bars says which. The ring shows all its sides. Means over many sets of shapes stand further down." },
];

// The image of the first questions, routed as in training: after one iteration it may be another answer than theirs.
function showFirst() {
  showExample(about.digits.nExamples);
  setRouting(about.digits.config.iterations, false);
}

// What the iterations have done to the lengths.
function grownText() {
  const [first, last] = [1, about.digits.config.iterations].map((t) => digits.result.iterations[t - 1].lengths);
  const grown = (j) => last[j] - first[j];
  const pair = longest({ lengths: last });
  const others = classes.filter((j) => !pair.includes(j)).map(grown);
  return `The two longest capsules${hides("answers") ? "" : `, ${pair.join(" and ")},`} have changed by ${pair.map((j) => signed(grown(j))).join(" and ")}. The other eight have changed by ${signed(Math.min(...others))} to ${signed(Math.max(...others))}. Move the slider, and watch the lengths.`;
}

const TWICE = 500; // ms, between two presses that are meant as one

function setUpTour() {
  const tour = $("tour");
  let steps = TOUR; // those whose parts a lesson shows
  let step = 0; // twice the number of the question, and one more where it is answered
  let before = ""; // the state when it began
  let past = []; // what Undo went back to then
  let ended = -Infinity; // ms
  const clear = () => {
    for (const marked of document.querySelectorAll(".toured, .asked")) marked.classList.remove("toured", "asked");
    telling.waits = false;
  };
  const show = (next) => {
    step = next;
    const { about: what, then = what, next: control, hidden, question, answer, before: ask, reveal, place = "" } = steps[step >> 1];
    const isAnswer = step % 2 === 1;
    const unanswered = steps.slice((step + 1) >> 1).flatMap((other) => other.hidden ?? []); // what the questions to come hide stays hidden
    clear();
    telling.waits = !isAnswer && Boolean(hidden);
    stopPlaying();
    document.documentElement.dataset.tour = place;
    for (const e of document.querySelectorAll(unanswered.join() || "none")) e.classList.add("asked");
    (isAnswer ? reveal : ask)?.();
    showBars(routed()); // in words too
    const shown = what === "sliders" ? $("sliders").firstElementChild : $(isAnswer ? then : what); // its first row
    (what === "sliders" ? shown.querySelector("input") : $(control ?? what)).before(tour); // so that it is the next stop of Tab
    shown.classList.add("toured");
    const room = innerWidth - $("bars").getBoundingClientRect().right - 24; // beside the bars, where the desk is wide
    const isWide = matchMedia("(min-width: 56.01rem)").matches && document.querySelector(".desk").getBoundingClientRect().bottom + scrollY < innerHeight;
    tour.style.width = what === "bars" && isWide && room > 150 ? `${room}px` : "";
    if (shown.closest(".desk") && isWide) scrollTo(0, 0);
    else if (!isAnswer || then === what || !isWide) shown.scrollIntoView({ block: shown.closest(".desk") || shown.id !== what && what !== "sliders" ? "nearest" : "start" });
    $("tour-text").replaceChildren(bold(`${(step >> 1) + 1} of ${steps.length}. `), !isAnswer ? question : typeof answer === "string" ? answer : answer());
    $("tour-next").textContent = !isAnswer ? "Show" : step + 1 < 2 * steps.length ? "Next" : "End";
    $("tour-back").disabled = step === 0;
    $("tour-next").focus({ preventScroll: true });
    tell("tour", $("tour-text").textContent);
  };
  const close = link.closeTour = () => {
    clear();
    tour.hidden = true;
    document.documentElement.removeAttribute("data-tour");
    document.querySelector("main").append(tour);
  };
  const end = () => {
    close();
    restore(before); // the drawing and the settings of before
    drawing.past = past;
    $("start-tour").focus();
    ended = performance.now();
  };
  $("start-tour").addEventListener("click", (event) => {
    if (!tour.hidden || (event.detail === 0 && performance.now() - ended < TWICE)) return; // a key twice on "End"
    before = stateText();
    if (!link.damaged) history.replaceState(null, "", `#${before}`);
    past = drawing.past;
    for (const id of DETAILS) $(id).open = false; // they would answer
    if (lesson.only.length) restore(before.replace(/^v=\d+&|&only=[^&]*|&z=.*/g, "")); // it shows every section
    steps = TOUR.filter(({ about: what, needs = "" }) => $(what).getClientRects().length && !needs.split(" ").some(hides));
    tour.hidden = false;
    show(0);
  });
  let pressed = -Infinity; // ms
  $("tour-next").addEventListener("click", ({ detail, timeStamp }) => {
    if (detail > 0 && timeStamp - pressed < TWICE) return; // a double click is meant once
    pressed = timeStamp;
    if (step + 1 < 2 * steps.length) show(step + 1);
    else end();
  });
  tour.addEventListener("keydown", (event) => { if (event.repeat && event.key === "Enter") event.preventDefault(); });
  $("tour-back").addEventListener("click", () => show(Math.max(0, 2 * ((step - 1) >> 1))));
  $("tour-end").addEventListener("click", end);
  addEventListener("keydown", (event) => { if (event.key === "Escape" && !tour.hidden) end(); });
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
  setUpLink();
  setUpTour();
  showNumbers();
  clearInterval(loadingTimer);
  $("loading").hidden = true;
  restore();
  const { strokes, example, kept } = drawing;
  const whole = example >= 0 && kept.includes(false) ? [{ strokes: [], example, kept: [true, true] }] : [];
  drawing.past = [...whole, ...strokes.map((_, k) => ({ strokes: strokes.slice(0, k), example, kept }))]; // of a link's drawing, stroke by stroke
  requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.ready = "true"; }));
}

window.explorer = { about, models, digits, dimensions, view, plane, showExample, begun: begin() };
window.explorer.begun.catch((error) => {
  $("failure").hidden = false;
  $("failure").textContent = `The page could not start: ${error.message}`;
  $("loading").hidden = true;
});
