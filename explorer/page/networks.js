// The networks as plain loops over typed arrays: forward passes only, one image at a time.
//
// Names and orders of axes are those of multimnist_capsnet.py and smallnorb_novel_viewpoint.py. An array is flat, its
// last axis runs fastest. `p` holds a network's parameters by name, as Float32Arrays.
"use strict";

const Networks = (() => {
  const SQUASH_EPS = 1e-9;
  const MASS_FLOOR = 1e-8;
  const POSE_SIDE = 4;

  // --------------------------------------------------------------------------------------------------------- layers

  // Adds values[m] * w[at[m] + f], summed over m < n, to sum[f]. Most of the time goes by here; four rows of w at a time
  // save three of four loads and stores of the sum. The lists have room for three more entries.
  function addRows(sum, values, at, n, w) {
    const F = sum.length;
    for (; n % 4; n++) values[n] = at[n] = 0;
    for (let m = 0; m < n; m += 4) {
      const [x0, x1, x2, x3] = [values[m], values[m + 1], values[m + 2], values[m + 3]];
      const [k0, k1, k2, k3] = [at[m], at[m + 1], at[m + 2], at[m + 3]];
      for (let f = 0; f < F; f++) sum[f] += x0 * w[k0 + f] + x1 * w[k1 + f] + x2 * w[k2 + f] + x3 * w[k3 + f];
    }
  }

  // x (H, H, C), w (K, K, C, F), b (F) -> (Ho, Ho, F) with `pad` zeros on each side.
  // Only inputs other than zero are listed: after a ReLU, and outside a digit, most are zero.
  function conv2d(x, H, C, w, b, K, stride, pad) {
    const F = b.length;
    const Ho = Math.floor((H + 2 * pad - K) / stride) + 1;
    const out = new Float32Array(Ho * Ho * F);
    const sum = new Float64Array(F);
    const values = new Float64Array(K * K * C + 3);
    const at = new Int32Array(K * K * C + 3);
    for (let r = 0; r < Ho; r++) {
      for (let s = 0; s < Ho; s++) {
        let n = 0;
        for (let i = 0; i < K; i++) {
          const row = r * stride + i - pad;
          if (row < 0 || row >= H) continue;
          for (let j = 0; j < K; j++) {
            const column = s * stride + j - pad;
            if (column < 0 || column >= H) continue;
            const from = (row * H + column) * C;
            for (let c = 0; c < C; c++) {
              if (x[from + c] === 0) continue;
              values[n] = x[from + c];
              at[n++] = ((i * K + j) * C + c) * F;
            }
          }
        }
        sum.set(b);
        addRows(sum, values, at, n, w);
        out.set(sum, (r * Ho + s) * F);
      }
    }
    return out;
  }

  // x (E), w (E, F) from row `first` on, b (F) -> (F)
  function linear(x, w, b, first = 0) {
    const F = b.length;
    const sum = Float64Array.from(b);
    const values = new Float64Array(x.length + 3);
    const at = new Int32Array(x.length + 3);
    let n = 0;
    for (let e = 0; e < x.length; e++) {
      if (x[e] === 0) continue;
      values[n] = x[e];
      at[n++] = (first + e) * F;
    }
    addRows(sum, values, at, n, w);
    return Float32Array.from(sum);
  }

  function relu(x) {
    for (let i = 0; i < x.length; i++) if (x[i] < 0) x[i] = 0;
    return x;
  }

  const sigmoid = (x) => 1 / (1 + Math.exp(-x));

  function softmax(x) {
    const most = Math.max(...x);
    const e = Array.from(x, (value) => Math.exp(value - most));
    const sum = e.reduce((a, b) => a + b, 0);
    return e.map((value) => value / sum);
  }

  // ------------------------------------------------------------------------ two digits: capsules with dynamic routing

  // image (H, H) in [0, 1] -> the result of each of `nIters` routing iterations:
  // logits (J, I), c (J, I) couplings, s (J, D), v (J, D) digit capsules, lengths (J); and uHat (J, I, D) the votes,
  // size (I) the lengths of the primary capsules.
  function capsnet(p, config, image, nIters) {
    const { side, types: T, primarySize: P, classes: J, capsuleSize: D } = config;
    const I = side * side * T;
    const h1 = relu(conv2d(image, config.imageSize, 1, p["conv1.w"], p["conv1.b"], config.kernel, 1, 0));
    const h1Side = config.imageSize - config.kernel + 1;
    const channels = p["conv1.b"].length;
    const h2 = conv2d(h1, h1Side, channels, p["primary.w"], p["primary.b"], config.kernel, 2, 0); // (side, side, T*P)

    // Primary capsules u (I, P), in the order row, column, type; each is squashed.
    const u = new Float32Array(I * P);
    const size = new Float32Array(I);
    for (let i = 0; i < I; i++) {
      let q = SQUASH_EPS;
      for (let e = 0; e < P; e++) q += h2[i * P + e] ** 2;
      for (let e = 0; e < P; e++) u[i * P + e] = (h2[i * P + e] * Math.sqrt(q)) / (1 + q);
      size[i] = q / (1 + q);
    }

    // Votes u_hat (J, I, D) = sum_p w[i, p, j, d] u[i, p]
    const w = p["routing.w"];
    const uHat = new Float32Array(J * I * D);
    const sum = new Float64Array(D);
    const values = new Float64Array(P + 3);
    const at = new Int32Array(P + 3);
    for (let j = 0; j < J; j++) {
      for (let i = 0; i < I; i++) {
        for (let e = 0; e < P; e++) {
          values[e] = u[i * P + e];
          at[e] = ((i * P + e) * J + j) * D;
        }
        sum.fill(0);
        addRows(sum, values, at, P, w);
        uHat.set(sum, (j * I + i) * D);
      }
    }

    // Dynamic routing [Sabour 2017, procedure 1]
    const b = new Float32Array(J * I);
    const iterations = [];
    for (let t = 0; t < nIters; t++) {
      const c = new Float32Array(J * I); // softmax of b over the parents j
      for (let i = 0; i < I; i++) {
        let most = -Infinity;
        for (let j = 0; j < J; j++) most = Math.max(most, b[j * I + i]);
        let sum = 0;
        for (let j = 0; j < J; j++) sum += c[j * I + i] = Math.exp(b[j * I + i] - most);
        for (let j = 0; j < J; j++) c[j * I + i] /= sum;
      }
      const logits = b.slice();
      const inputs = new Float32Array(J * D);
      const v = new Float32Array(J * D);
      const lengths = new Float32Array(J);
      for (let j = 0; j < J; j++) {
        const s = new Float64Array(D);
        for (let i = 0; i < I; i++) {
          const coupling = c[j * I + i];
          const o = (j * I + i) * D;
          for (let d = 0; d < D; d++) s[d] += coupling * uHat[o + d];
        }
        inputs.set(s, j * D);
        let q = SQUASH_EPS;
        for (let d = 0; d < D; d++) q += s[d] ** 2;
        let square = SQUASH_EPS;
        for (let d = 0; d < D; d++) square += (v[j * D + d] = (s[d] * Math.sqrt(q)) / (1 + q)) ** 2;
        lengths[j] = Math.sqrt(square);
        for (let i = 0; i < I; i++) {
          const o = (j * I + i) * D;
          let agreement = 0;
          for (let d = 0; d < D; d++) agreement += v[j * D + d] * uHat[o + d];
          b[j * I + i] += agreement;
        }
      }
      iterations.push({ logits, c, s: inputs, v, lengths });
    }
    return { iterations, size, uHat };
  }

  // x (H, H, C) -> (H / 2, H / 2, C), the largest of each four; an odd last row or column is dropped.
  function maxPool(x, H, C) {
    const side = H >> 1;
    const out = new Float32Array(side * side * C);
    for (let r = 0; r < side; r++) {
      for (let s = 0; s < side; s++) {
        const at = (2 * r * H + 2 * s) * C;
        for (let c = 0; c < C; c++) {
          const k = at + c;
          out[(r * side + s) * C + c] = Math.max(x[k], x[k + C], x[k + H * C], x[k + (H + 1) * C]);
        }
      }
    }
    return out;
  }

  // image (H, H) in [0, 1] -> probabilities (J) of the CNN with pooling: convolutions, each with ReLU and pooling
  function cnnPool(p, config, image) {
    let [x, H, C] = [image, config.imageSize, 1];
    for (let k = 1; p[`conv${k}.w`]; k++) {
      const [w, b] = [p[`conv${k}.w`], p[`conv${k}.b`]];
      const K = Math.round(Math.sqrt(w.length / (C * b.length)));
      C = b.length;
      x = maxPool(relu(conv2d(x, H, w.length / (K * K * C), w, b, K, 1, 0)), H - K + 1, C);
      H = (H - K + 1) >> 1;
    }
    const hidden = relu(linear(x, p["hidden.w"], p["hidden.b"]));
    return Array.from(linear(hidden, p["out.w"], p["out.b"]), sigmoid);
  }

  // One digit capsule (D) of class j -> picture (H*H). The others are zero, so only D rows of the first layer count.
  function decoder(p, capsule, j) {
    let x = relu(linear(capsule, p["decoder1.w"], p["decoder1.b"], j * capsule.length));
    x = relu(linear(x, p["decoder2.w"], p["decoder2.b"]));
    return linear(x, p["decoder3.w"], p["decoder3.b"]).map(sigmoid);
  }

  // ----------------------------------------------------------------------- a viewpoint: matrix capsules with EM routing

  // votes (I, J, D), aIn (I), lambdas: one inverse temperature an iteration -> mu and sigmaSq (J, D), a (J),
  // r (I, J) as the last M-step was given them
  function emRouting(votes, aIn, betaA, betaV, lambdas, varianceFloor) {
    const I = aIn.length;
    const J = betaA.length;
    const D = votes.length / (I * J);
    const r = new Float64Array(I * J).fill(1 / J);
    const mu = new Float64Array(J * D);
    const sigmaSq = new Float64Array(J * D);
    const a = new Float64Array(J);
    lambdas.forEach((lambda, t) => {
      const logA = new Float64Array(J);
      for (let j = 0; j < J; j++) {
        // M-step
        let mass = MASS_FLOOR;
        for (let i = 0; i < I; i++) mass += r[i * J + j] * aIn[i];
        let logSigma = 0;
        for (let d = 0; d < D; d++) {
          let mean = 0;
          for (let i = 0; i < I; i++) mean += ((r[i * J + j] * aIn[i]) / mass) * votes[(i * J + j) * D + d];
          let variance = varianceFloor;
          for (let i = 0; i < I; i++) {
            variance += ((r[i * J + j] * aIn[i]) / mass) * (votes[(i * J + j) * D + d] - mean) ** 2;
          }
          mu[j * D + d] = mean;
          sigmaSq[j * D + d] = variance;
          logSigma += 0.5 * Math.log(variance);
        }
        const z = lambda * (betaA[j] - (D * betaV[j] + logSigma) * mass);
        a[j] = sigmoid(z);
        logA[j] = z > 0 ? -Math.log1p(Math.exp(-z)) : z - Math.log1p(Math.exp(z));
      }
      if (t === lambdas.length - 1) return;
      for (let i = 0; i < I; i++) {
        // E-step, in logarithms
        const logAp = new Float64Array(J);
        for (let j = 0; j < J; j++) {
          let distance = 0;
          for (let d = 0; d < D; d++) {
            const s = sigmaSq[j * D + d];
            distance += (votes[(i * J + j) * D + d] - mu[j * D + d]) ** 2 / s + Math.log(s);
          }
          logAp[j] = logA[j] - 0.5 * distance;
        }
        softmax(logAp).forEach((value, j) => { r[i * J + j] = value; });
      }
    });
    return { mu, sigmaSq, a, r };
  }

  function viewFeatures(p, config, image) {
    let x = image;
    if (config.standardize) {
      const mean = image.reduce((a, b) => a + b, 0) / image.length;
      const sd = Math.sqrt(image.reduce((sum, value) => sum + (value - mean) ** 2, 0) / image.length);
      x = image.map((value) => (value - mean) / (sd + 1e-6));
    }
    return relu(conv2d(x, config.imageSize, 1, p["conv1.w"], p["conv1.b"], config.kernel, 2, 2));
  }

  // image (32, 32) -> scores (J), class poses mu (J, 16), activations a (J)
  function matrixCapsules(p, config, image) {
    const primary = linear(viewFeatures(p, config, image), p["primary.w"], p["primary.b"]);
    const { primaries: I, classes: J } = config;
    const D = POSE_SIDE * POSE_SIDE;
    const aIn = Array.from(primary.subarray(I * D), sigmoid);
    const w = p["class.w"];
    const votes = new Float32Array(I * J * D); // V_ij = M_i W_ij
    for (let i = 0; i < I; i++) {
      for (let j = 0; j < J; j++) {
        for (let row = 0; row < POSE_SIDE; row++) {
          for (let column = 0; column < POSE_SIDE; column++) {
            let sum = 0;
            for (let k = 0; k < POSE_SIDE; k++) {
              sum += primary[i * D + row * POSE_SIDE + k] * w[(i * J + j) * D + k * POSE_SIDE + column];
            }
            votes[(i * J + j) * D + row * POSE_SIDE + column] = sum;
          }
        }
      }
    }
    const { mu, a } = emRouting(votes, aIn, p["class.beta_a"], p["class.beta_v"], config.lambdas, config.varianceFloor);
    const scores = Array.from(a, (activation, j) => {
      if (config.loss === "spread") return activation;
      let square = 0;
      for (let d = 0; d < D; d++) square += mu[j * D + d] ** 2;
      return square / 16 + 4 * (activation - 0.5);
    });
    return { scores, mu, a };
  }

  // image (32, 32) -> scores (J)
  function cnn(p, config, image) {
    const units = relu(linear(viewFeatures(p, config, image), p["hidden.w"], p["hidden.b"]));
    return linear(units, p["out.w"], p["out.b"]);
  }

  // One object's points [[x, y, z], …], angles in degrees -> picture (side, side) in [0, 1]; see render_voxels.
  function renderVoxels(points, azimuth, elevation, side) {
    const [az, el] = [(azimuth * Math.PI) / 180, (elevation * Math.PI) / 180];
    const [ca, sa, ce, se] = [Math.cos(az), Math.sin(az), Math.cos(el), Math.sin(el)];
    const zoom = side / 32;
    const [centre, scale, sigma] = [(side - 1) / 2, 12 * zoom, 1.6 * zoom];
    const picture = new Float32Array(side * side);
    const rows = new Float64Array(side);
    const columns = new Float64Array(side);
    for (const [px, py, pz] of points) {
      const x = ca * px + sa * pz;
      const y = se * sa * px + ce * py - se * ca * pz;
      const z = -ce * sa * px + se * py + ce * ca * pz;
      for (let k = 0; k < side; k++) {
        rows[k] = (0.8 + 0.2 * z) * Math.exp(-0.5 * ((k - centre + scale * y) / sigma) ** 2);
        columns[k] = Math.exp(-0.5 * ((k - centre - scale * x) / sigma) ** 2);
      }
      for (let r = 0; r < side; r++) {
        if (rows[r] < 1e-9) continue;
        for (let c = 0; c < side; c++) picture[r * side + c] += rows[r] * columns[c];
      }
    }
    for (let k = 0; k < picture.length; k++) picture[k] = Math.min(1, picture[k]);
    return picture;
  }

  return { capsnet, cnnPool, decoder, emRouting, matrixCapsules, cnn, renderVoxels, softmax };
})();
