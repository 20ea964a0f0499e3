// The pictures of docs/page.md and README, taken with PAGE_PICTURES=FOLDER. They show simulated machines, at the rates of
// docs/planning.md.
import { writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { chat, longText } from './cluster.mjs';
import { expect, test } from './browser.mjs';

const FOLDER = process.env.PAGE_PICTURES;
const MODEL = 'llama-3.1-8b';
const machine = (name, prefill_tps, decode_tps) => [
  '--sim-machine',
  JSON.stringify({ name, prefill_tps, decode_tps, decode_sharing_cost: 0.063, kv_bytes_per_token: 131_072, link_bytes_per_second: 1.25e9, link_round_trip_ms: 0.3 }),
];
const MAC = machine('M3 Ultra', 1470, 38.2);
const SPARK = machine('DGX Spark', 5570, 10.9);

test.setTimeout(240_000);

/** Takes a picture of the window, of the whole page, or of an element. WebP, which Playwright itself does not write. */
async function picture(page, name, { whole = false, element } = {}) {
  const box = await element?.boundingBox();
  const scroll = await page.evaluate(() => scrollY);
  const clip = box && { ...box, y: box.y + scroll, scale: 1 };
  const debug = await page.context().newCDPSession(page);
  const { data } = await debug.send('Page.captureScreenshot', { format: 'webp', quality: 85, captureBeyondViewport: whole || clip !== undefined, ...(clip ? { clip } : {}) });
  await writeFile(join(FOLDER, `page-${name}.webp`), Buffer.from(data, 'base64'));
}

/** A prompt of about this many tokens: the simulator's tokens are bytes. */
function prompt(tokens, seed) {
  return longText(tokens / 5, seed).slice(0, tokens);
}

/** A household: a coding agent with long prompts, and short questions. */
async function play(url, seconds, seed) {
  const end = Date.now() + seconds * 1000;
  const ask = async (tokens, max_tokens, pause, name) => {
    for (let i = 0; Date.now() < end; i += 1) {
      await chat(url, prompt(tokens * (0.7 + 0.6 * ((i * 7) % 10) / 10), `${seed}${name}${i}`), { model: MODEL, max_tokens });
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  };
  await Promise.all([ask(8000, 60, 900, 'a'), ask(300, 120, 1500, 'b'), ask(4000, 40, 2500, 'c')]);
}

test('pictures', async ({ page, problems, cluster }) => {
  const sim = ['--engine', 'sim', '--slots', '4', '--ctx-size', '32768'];
  const spark = await cluster.node('--role', 'prefill', ...sim, ...SPARK);
  const second = await cluster.node('--role', 'prefill', ...sim, ...SPARK);
  const { url } = await cluster.serve(...sim, '--name', MODEL, ...MAC, '--prefill', spark.url, '--prefill', second.url);
  await page.setViewportSize({ width: 1760, height: 1130 });
  await page.goto(url);
  await expect(page.locator('.link').last()).toContainText('GB/s', { timeout: 30_000 });
  await play(url, 70, 'm');
  // The node that computes a prompt is lost in the middle.
  const last = chat(url, prompt(16000, 'z'), { model: MODEL, max_tokens: 40 });
  const running = page.locator('.request.running', { has: page.locator('.outcome', { hasText: 'Handing over' }) });
  const isFirst = (await running.textContent()).includes('prefill-1');
  await (isFirst ? spark : second).kill();
  await last;
  await expect(page.locator('.machine.down')).toBeVisible();
  const playing = play(url, 24, 'n');
  await page.waitForTimeout(15_000);
  await expect(page.locator('.sites .kv').first()).toBeVisible({ timeout: 20_000 });
  await picture(page, 'overview');
  await playing;
  await page.setViewportSize({ width: 1100, height: 900 });
  const handoff = page.locator('.request.done', { hasText: /prefill-\d → local/ }).first();
  await handoff.getByRole('button').click();
  await expect(handoff.locator('.details')).toBeVisible();
  await picture(page, 'waterfall', { element: handoff });

  await page.setViewportSize({ width: 390, height: 1100 });
  await handoff.evaluate((row) => row.scrollIntoView());
  await picture(page, 'phone');

  await page.setViewportSize({ width: 1100, height: 620 });
  await page.getByRole('link', { name: 'Plan' }).click();
  await page.getByLabel('A prompt, or the JSON body').fill(prompt(9000, 'p'));
  await page.getByRole('button', { name: 'Show the routes' }).click();
  await expect(page.locator('.plan tbody tr')).toHaveCount(3);
  await picture(page, 'plan');
  expect(problems).toEqual([]);
});

test('a picture of a chat', async ({ page, problems, cluster }) => {
  const prefill = await cluster.node('--role', 'prefill', '--model', 'smollm2');
  const { url } = await cluster.serve('--model', 'smollm2', '--prefill', prefill.url, '--policy', 'always_handoff');
  await page.emulateMedia({ colorScheme: 'dark' });
  await page.setViewportSize({ width: 1100, height: 700 });
  await page.goto(`${url}/#try`);
  for (const text of ['What is a relay race? Answer in two sentences.', 'And what is a baton?']) {
    await page.getByLabel('Message', { exact: true }).fill(text);
    await page.getByRole('button', { name: 'Send' }).click();
    await expect(page.getByRole('button', { name: 'Send' })).toBeVisible();
  }
  await picture(page, 'chat');
  expect(problems).toEqual([]);
});
