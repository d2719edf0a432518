// The surface that writes SVG: the same calls as the canvas, as elements. No strips: exact tiles.

class SvgSurface {
  constructor(width, height, title) {
    this.width = width;
    this.height = height;
    this.title = title;
    this.parts = [];
    this.y = 0; // of what is drawn from here on
  }

  shift(y) {
    this.y += y;
  }

  rect(x, y, width, height, paint, opacity = 1) {
    const see = opacity === 1 ? "" : ` opacity="${opacity}"`;
    const place = at(x, y + this.y);
    this.parts.push(`<rect ${place} ${sized(width, height)} fill="${paint}"${see}/>`);
  }

  frame(x, y, width, height, paint) {
    const size = sized(Math.max(width - 2, 1), Math.max(height - 2, 1));
    this.parts.push(
      `<rect ${at(x + 1, y + this.y + 1)} ${size} fill="none" stroke="${paint}" stroke-width="2"/>`);
  }

  text(text, x, y, size, ink, anchor) {
    const place = `${at(x, y + this.y + size * 0.36)} font-size="${size}" text-anchor="${anchor}"`;
    this.parts.push(`<text ${place} fill="${ink}">${escapeXml(text)}</text>`);
  }

  number(text, x, y, size, ink) {
    this.text(text, x, y, size, ink, "middle");
  }

  arrow(x0, y0, x1, y1, paint) {
    const [top, bottom] = [short2(y0 + this.y), short2(y1 + this.y)];
    const ends = `x1="${short2(x0)}" y1="${top}" x2="${short2(x1)}" y2="${bottom}"`;
    this.parts.push(`<line ${ends} stroke="${paint}" marker-end="url(#tip)"/>`);
  }

  toString() {
    const { width, height, title } = this;
    return [
      `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}"` +
        ` height="${height}" font-family="Inter,Helvetica,Arial,sans-serif" role="img">`,
      `<title>${escapeXml(title)}</title>`,
      '<marker id="tip" orient="auto" refX="6" refY="3" markerWidth="6" markerHeight="6">' +
        '<path d="M0 0L6 3L0 6z" fill="context-stroke"/></marker>',
      ...this.parts, "</svg>\n",
    ].join("\n");
  }
}

const short2 = (value) => Number(value.toFixed(2));
const at = (x, y) => `x="${short2(x)}" y="${short2(y)}"`;
const sized = (width, height) =>
  `width="${short2(Math.max(width, 0))}" height="${short2(Math.max(height, 0))}"`;

function escapeXml(text) {
  return text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
}
