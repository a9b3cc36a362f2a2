// Measures pages that are shown in frames, and writes the result as JSON into this document. The pages have no scripts.

const box = ({ left, top, right, bottom }) => [left, top, right, bottom];
const boxesOf = (page, selector) =>
  [...page.querySelectorAll(selector)].map((element) => box(element.getBoundingClientRect()));

// Returns each text with the boxes of its lines. Texts of tooltips have none.
function textsOf(page) {
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) {
    const range = page.createRange();
    range.selectNodeContents(walker.currentNode);
    const boxes = [...range.getClientRects()].map(box);
    if (walker.currentNode.data.trim() && boxes.length) texts.push({ text: walker.currentNode.data.trim(), boxes });
  }
  return texts;
}

const channels = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
const VISIBLE = 64; // of 255: a span of a quarter of a pixel is visible, as a pixel of a lighter color
const SIMILAR = 48; // at the edge of an area, the browser mixes its color with that of the next one

// Returns the colors of a picture, as the browser paints it: for each column of pixels, the number of pixels per color.
async function columnsOf(picture) {
  const { width, height } = picture.getBoundingClientRect();
  const copy = picture.cloneNode(true);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const image = new Image();
  image.src = "data:image/svg+xml," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
  await image.decode();
  const canvas = new OffscreenCanvas(Math.round(width), Math.round(height));
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const used = ["fill", "stroke"].flatMap((name) =>
    [...picture.querySelectorAll(`[${name}^='#']`)].map((shape) => shape.getAttribute(name)));
  const palette = [...new Set(used)].map((color) => [color, channels(color)]);
  const columns = [];
  for (let x = 0; x < canvas.width; x++) {
    const counts = {};
    for (let at = 4 * x; at < pixels.length; at += 4 * canvas.width) {
      if (pixels[at + 3] < VISIBLE) continue;
      const distance = (parts) => Math.hypot(...parts.map((part, index) => part - pixels[at + index]));
      for (const [color, parts] of palette)
        if (distance(parts) < SIMILAR) counts[color] = (counts[color] || 0) + 1;
    }
    columns.push(counts);
  }
  return columns;
}

async function measure(frame) {
  const page = frame.contentDocument;
  const pictures = [];
  for (const picture of page.querySelectorAll("svg"))
    pictures.push({
      box: box(picture.getBoundingClientRect()),
      lines: [...picture.querySelectorAll("polyline, line")].map((line) => box(line.getBoundingClientRect())),
      shapes: [...picture.querySelectorAll("polygon, rect")].map((shape) => box(shape.getBoundingClientRect())),
      columns: await columnsOf(picture),
    });
  return {
    content: page.documentElement.scrollWidth,
    visible: page.documentElement.clientWidth,
    font: frame.contentWindow.getComputedStyle(page.body).fontSize,
    texts: textsOf(page),
    colors: boxesOf(page, ".legend i"),
    bars: [...page.querySelectorAll(".bar")].map((bar) => ({
      box: box(bar.getBoundingClientRect()),
      bands: [...bar.querySelectorAll("i")].map((band) => box(band.getBoundingClientRect())),
      marks: [...bar.querySelectorAll("b")].map((mark) => box(mark.getBoundingClientRect())),
    })),
    pictures,
  };
}

onload = async () => {
  const measured = {};
  for (const frame of document.querySelectorAll("iframe")) measured[frame.id] = await measure(frame);
  const result = document.createElement("pre");
  result.textContent = JSON.stringify(measured);
  document.body.replaceChildren(result);
};
