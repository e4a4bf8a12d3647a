/** Stored samples as the page uses them: one form for JSON and for binary samples, and the numbers of each token. */

const MAGIC = 0x5342_46f8;
const ABSENT = 0xffff_ffff;
const HEAD_BYTES = 16;

const READERS = {
  F64: (view, at) => view.getFloat64(at, true), F32: (view, at) => view.getFloat32(at, true),
  F16: (view, at) => view.getFloat16(at, true), BF16: bfloat,
  I64: (view, at) => Number(view.getBigInt64(at, true)), U64: (view, at) => Number(view.getBigUint64(at, true)),
  I32: (view, at) => view.getInt32(at, true), U32: (view, at) => view.getUint32(at, true),
  I16: (view, at) => view.getInt16(at, true), U16: (view, at) => view.getUint16(at, true),
  I8: (view, at) => view.getInt8(at), U8: (view, at) => view.getUint8(at), BOOL: (view, at) => view.getUint8(at),
};
/** Bytes of an item, from the name of its type. */
const width = (dtype) => (dtype === "BOOL" ? 1 : Number(dtype.match(/\d+$/)) / 8);

/**
 * A stored body. `fields` is its JSON object, or null for a body of another shape, of which `raw` is the text.
 * `tokens` is null without token ids; `logprobs` (NaN: none) and `mask` have an entry for each token, or are null.
 */
export function decode(buffer) {
  const view = new DataView(buffer);
  const isBinary = buffer.byteLength >= HEAD_BYTES && view.getUint32(0, true) === MAGIC;
  const sample = isBinary ? fromBinary(buffer, view) : fromJson(buffer);
  const { fields, tokens } = sample;
  if (!tokens) return { ...sample, tokens: null, logprobs: null, mask: null };
  const place = (values) => (values ? placed(values, tokens.length, fields.response_length) : null);
  return { ...sample, logprobs: place(sample.logprobs), mask: place(sample.mask) };
}

function fromBinary(buffer, view) {
  const counts = [4, 8, 12].map((at) => view.getUint32(at, true));
  const lengths = counts.map((count) => (count === ABSENT ? 0 : count));
  const logprobsAt = HEAD_BYTES + 4 * lengths[0];
  const maskAt = logprobsAt + 4 * lengths[1];
  const jsonAt = maskAt + lengths[2];
  if (counts[0] === ABSENT || jsonAt > buffer.byteLength) return fromJson(buffer);
  const sample = fromJson(buffer.slice(jsonAt));
  return {
    ...sample,
    tokens: sample.fields && new Int32Array(buffer, HEAD_BYTES, lengths[0]),
    logprobs: counts[1] === ABSENT ? null : new Float32Array(buffer, logprobsAt, lengths[1]),
    mask: counts[2] === ABSENT ? null : new Uint8Array(buffer, maskAt, lengths[2]),
  };
}

function fromJson(buffer) {
  const raw = new TextDecoder().decode(buffer);
  let fields = null;
  try {
    fields = JSON.parse(raw);
  } catch {
    // Shown as it is.
  }
  if (fields === null || typeof fields !== "object" || Array.isArray(fields)) return { fields: null, raw };
  const lists = ["tokens", "logprobs", "loss_mask"].map((name) => fields[name]);
  const isOfTokens = Array.isArray(lists[0]) && lists[0].length > 0 && lists[0].every(Number.isInteger);
  const numbers = (list) => (Array.isArray(list) ? Float64Array.from(list, numeric) : null);
  return { fields, raw, tokens: isOfTokens ? lists[0] : null, logprobs: numbers(lists[1]), mask: numbers(lists[2]) };
}

const numeric = (value) => (typeof value === "object" ? NaN : Number(value));

/** Values of all tokens, or of the response, which are the last ones; null for another number of values. */
function placed(values, numTokens, responseLength) {
  if (values.length === numTokens) return values;
  if (values.length > numTokens || values.length !== responseLength) return null;
  const all = new Float64Array(numTokens).fill(NaN);
  all.set(values, numTokens - values.length);
  return all;
}

/** The names of the arrays of a sample or an annotation that have one number for each token. */
export function arraysOf(fields) {
  const arrays = fields.arrays;
  if (arrays === null || typeof arrays !== "object") return [];
  const isScalar = ({ shape, dtype, rows }) =>
    Object.keys(READERS).includes(dtype) && Array.isArray(rows) && Array.isArray(shape) && shape.every((size) => size === 1);
  return Object.keys(arrays).filter((name) => isScalar(arrays[name] ?? {}));
}

/** One number for each token, NaN where the array has none. `getPart(digest)` returns the bytes of a part. */
export async function arrayOf(fields, name, numTokens, getPart) {
  const { rows } = fields.arrays[name];
  const values = new Float64Array(numTokens).fill(NaN);
  const tensors = new Map();
  for (const [part, first, start, end] of rows) {
    if (!tensors.has(part)) tensors.set(part, tensor(await getPart(fields.parts[part]), name));
    const item = tensors.get(part);
    for (let token = start; token < end; token += 1) values[token] = item(first + token - start);
  }
  return values;
}

/** A function that returns the item of a number, of a tensor in the format safetensors. */
function tensor(buffer, name) {
  const view = new DataView(buffer);
  const headBytes = Number(view.getBigUint64(0, true));
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, headBytes)));
  const { dtype, data_offsets: [start] } = head[name];
  return (number) => READERS[dtype](view, 8 + headBytes + start + number * width(dtype));
}

function bfloat(view, at) {
  const bits = new DataView(new ArrayBuffer(4));
  bits.setUint16(2, view.getUint16(at, true), true);
  return bits.getFloat32(0, true);
}
