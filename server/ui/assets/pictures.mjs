/** The images of messages: in a data URL, or stored as parts of the sample. Nothing is loaded from another address. */

import { size } from "./widgets.mjs";

const PART = "forebay-part:";
const TYPE = /^image\/(png|jpeg|gif|webp)$/;
const DATA = /^data:(image\/(?:png|jpeg|gif|webp));base64,/;
const MOST_BYTES = 4_000_000;
const MOST_OF_A_PAGE = 64_000_000;

/** `{url, type}` of each image of a message; `type` only of those that are parts. */
export function imagesOf(message) {
  if (!Array.isArray(message?.content)) return [];
  const images = message.content.map((part) => ({ url: part?.image_url?.url ?? part?.image_url, type: part?.image_url?.media_type }));
  return images.filter(({ url }) => typeof url === "string");
}

/** By address: `{src}` for an `img`, or `{problem}`: why there is none. `getPart(digest)` returns bytes. */
export async function picturesOf(messages, getPart) {
  const found = new Map();
  let numBytes = 0;
  for (const { url, type } of messages.flatMap(imagesOf)) {
    if (found.has(url)) continue;
    const picture = numBytes > MOST_OF_A_PAGE ? { problem: `the page shows at most ${size(MOST_OF_A_PAGE)} of images` } : await pictureOf(url, type, getPart);
    numBytes += picture.src?.length ?? 0;
    found.set(url, picture);
  }
  return found;
}

async function pictureOf(url, type, getPart) {
  if (DATA.test(url)) return limited(url);
  if (!url.startsWith(PART)) return { problem: "images of other addresses and types are not loaded" };
  if (!TYPE.test(type)) return { problem: "its type is not shown" };
  try {
    return limited(await dataUrl(new Blob([await getPart(url.slice(PART.length))], { type })));
  } catch (error) {
    return { problem: error.message };
  }
}

function limited(src) {
  return src.length <= MOST_BYTES ? { src } : { problem: `it has ${size(src.length)}, and the page shows ${size(MOST_BYTES)}` };
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
