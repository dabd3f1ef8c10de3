// Arrays from text: base64, deflate, and bytes in planes, which deflate better.

async function unpack(text, kind) {
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(inflated).arrayBuffer());
  const size = kind.BYTES_PER_ELEMENT;
  const length = planes.length / size;
  const bytes = new Uint8Array(planes.length);
  for (let plane = 0; plane < size; plane++) {
    const from = plane * length;
    for (let i = 0; i < length; i++) bytes[i * size + plane] = planes[from + i];
  }
  return new kind(bytes.buffer);
}

async function unpackRun(run, classCount) {
  const [levels, targets, rows] = await Promise.all([
    unpack(run.embedded.levels, Uint16Array),
    unpack(run.embedded.targets, Uint32Array),
    unpack(run.embedded.rows, Uint32Array),
  ]);
  return { ...run, levels, targets, rows, size: run.embedded.samples, width: classCount };
}
