// Runs Perfetto's trace processor (the wasm of its web UI) under node, for tests.
//
//   node engine.cjs FOLDER     FOLDER holds engine_bundle.js and trace_processor.wasm
//
// Bytes on stdin and stdout are Perfetto's own TraceProcessorRpcStream, both ways.
"use strict";
const fs = require("node:fs");
const path = require("node:path");

const folder = process.argv[2];
const read = (name) => fs.readFileSync(path.join(folder, path.basename(name)));

// The bundle is written for a web worker: it fetches its wasm with a synchronous XMLHttpRequest
// and gets, in its first message, the port that it talks through. This is that worker's world.
class FileRequest {
  open(_method, url) {
    this.url = url;
  }
  send() {
    const { buffer, byteOffset, length } = read(this.url);
    this.status = 200;
    this.response = buffer.slice(byteOffset, byteOffset + length);
  }
}
const toStderr = (text) => fs.writeSync(2, `${text}\n`);
const world = {
  self: { location: { href: "http://engine.invalid/" } },
  location: { href: "http://engine.invalid/" },
  XMLHttpRequest: FileRequest,
  WorkerGlobalScope: class {},
  console: { log() {}, info() {}, debug() {}, warn: toStderr, error: toStderr },
  process: undefined, // the bundle must not notice node and look for its files by itself
  window: undefined,
};
new Function(...Object.keys(world), read("engine_bundle.js").toString())(...Object.values(world));

const writeAll = (bytes) => {
  for (let at = 0; at < bytes.length; ) {
    try {
      at += fs.writeSync(1, bytes, at);
    } catch (error) {
      if (error.code !== "EAGAIN") throw error; // a full pipe: try again
    }
  }
};
const port = { postMessage: writeAll };
world.self.onmessage({ data: port });
process.stdin.on("data", (bytes) => port.onmessage({ data: new Uint8Array(bytes) }));
