/** Pictures and text files that go with a message. */

import { bytes } from '../format';
import type { Picture, TextFile } from './turns';

export interface Attached {
  pictures: Picture[];
  files: TextFile[];
}

export const NOTHING_ATTACHED: Attached = { pictures: [], files: [] };

/** What every model's server reads. */
const PICTURES = ['image/png', 'image/jpeg', 'image/webp', 'image/gif'];

const MAX_ATTACHED = 16;
const MAX_PICTURE_BYTES = 8 << 20;
const MAX_TEXT_BYTES = 1 << 20;
/** Of one message: the endpoint takes bodies of 32 MiB, and a picture grows by a third on its way. */
const MAX_ALL_BYTES = 20 << 20;

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error(`“${file.name}” cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/** The text of a file. Errors: it is no text, or too long. */
async function textOf(file: File): Promise<string> {
  if (file.size > MAX_TEXT_BYTES) throw new Error(`“${file.name}” has ${bytes(file.size)}; a text file may have ${bytes(MAX_TEXT_BYTES)}.`);
  const wrong = new Error(`“${file.name}” is neither a picture (PNG, JPEG, WebP, GIF) nor text in UTF-8.`);
  let text: string;
  try {
    text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw wrong;
  }
  if (text.includes('\0')) throw wrong;
  return text;
}

/** Adds files that were chosen, dropped or pasted. Errors: one of them cannot be sent; then none is added. */
export async function attach(before: Attached, chosen: File[]): Promise<Attached> {
  const now = { pictures: [...before.pictures], files: [...before.files] };
  if (now.pictures.length + now.files.length + chosen.length > MAX_ATTACHED) throw new Error(`A message may have ${MAX_ATTACHED} files.`);
  const size = now.pictures.reduce((sum, { url }) => sum + 0.75 * url.length, 0) + now.files.reduce((sum, { text }) => sum + text.length, 0);
  if (size + chosen.reduce((sum, file) => sum + file.size, 0) > MAX_ALL_BYTES) throw new Error(`The files of a message may have ${bytes(MAX_ALL_BYTES)} together.`);
  for (const file of chosen) {
    if (PICTURES.includes(file.type)) {
      if (file.size > MAX_PICTURE_BYTES) throw new Error(`“${file.name}” has ${bytes(file.size)}; a picture may have ${bytes(MAX_PICTURE_BYTES)}.`);
      now.pictures.push({ name: file.name, url: await dataUrl(file) });
    } else {
      now.files.push({ name: file.name, text: await textOf(file) });
    }
  }
  return now;
}
