// Reading the page's data: text to bytes, bytes to columns of 32-bit integers.

function fromBase64(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

async function decompress(bytes, format) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream(format));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// The lowest byte of all values comes first, then the next: alike bytes side by side pack small.
function readColumn(bytes, at, count, isDifference) {
  const values = new Int32Array(count);
  let sum = 0;
  for (let i = 0; i < count; i++) {
    const value = bytes[at + i] | (bytes[at + count + i] << 8) |
      (bytes[at + 2 * count + i] << 16) | (bytes[at + 3 * count + i] << 24);
    sum = isDifference ? (sum + value) | 0 : value;
    values[i] = sum;
  }
  return values;
}

// Gives every view of the data its columns, by name.
async function readViews(data) {
  const bytes = await decompress(fromBase64(data.blob), "deflate");
  let at = 0;
  return data.views.map((view) => {
    const columns = {};
    for (const [name, count, isDifference] of view.columns) {
      columns[name] = readColumn(bytes, at, count, isDifference);
      at += 4 * count;
    }
    return { ...view, columns };
  });
}
