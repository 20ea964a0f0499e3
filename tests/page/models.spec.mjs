// The models of real machines: what is where, copied, deleted, loaded; and who may do that.
import { mkdir, mkdtemp, readdir, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, expectAccessible, expectNoSidewaysScroll, test } from './browser.mjs';

const MODEL = 'me/one:a-Q4_0.gguf';
const SIM = '[model.engine]\nengine = "sim"\n';

/** A models folder with a model of this many bytes, or with none. */
async function folder(n_bytes) {
  const cache = await mkdtemp(join(tmpdir(), 'page-models-'));
  await mkdir(join(cache, 'hub/me/one'), { recursive: true });
  if (n_bytes > 0) await writeFile(join(cache, 'hub/me/one/a-Q4_0.gguf'), Buffer.alloc(n_bytes, 7));
  return { cache, files: async () => (await readdir(join(cache, 'hub'), { recursive: true })).filter((name) => name.endsWith('.gguf')) };
}

async function config(text) {
  const file = join(await mkdtemp(join(tmpdir(), 'page-')), 'baton.toml');
  await writeFile(file, text);
  return ['--config', file];
}

test('a model is copied to another machine with its progress, deleted there, and another one loaded and pinned', async ({ page, problems, cluster }) => {
  const [own, spark, mac] = await Promise.all([folder(0), folder(3 << 20), folder(0)]);
  const sim = ['--engine', 'sim', '--name', 'sim'];
  const [a, b] = await Promise.all([spark, mac].map(({ cache }) => cluster.nodeWith({ BATON_CACHE: cache }, ...sim)));
  const onDemand = '[[models]]\nname = "idle"\nsource = "sim"\n[models.engine]\nengine = "sim"\n';
  const args = await config(`allow_model_management = true\n[model]\nname = "sim"\ndecode = ["${a.url}", "${b.url}"]\n${SIM}${onDemand}`);
  const { url } = await cluster.serveWith({ BATON_CACHE: own.cache }, ...args);
  await page.goto(`${url}/#models`);
  const names = (await (await fetch(`${url}/baton/models`)).json()).machines.map(({ machine }) => machine);
  expect(names.length).toBe(3);
  const [, first, second] = names;
  const model = page.locator('.files tbody tr', { hasText: MODEL });
  await expect(model).toContainText('Q4_0');
  await expect(model).toContainText('3 MiB');
  await expect(model.locator('.places li')).toHaveText([new RegExp(`^${first}`)]);

  await model.getByLabel(`Copy ${MODEL} to`).selectOption(second);
  await model.getByRole('button', { name: 'Copy there' }).click();
  const card = page.locator('.card', { hasText: second });
  await expect(card.locator('.moving')).toContainText(`Complete: ${MODEL} from another machine, 3 MiB of 3 MiB`);
  await expect(model.locator('.places li')).toHaveCount(2);
  await expect(model).toContainText('sha256');
  expect(await mac.files()).toEqual(['me/one/a-Q4_0.gguf']);
  // What is on its way has a bar; the bytes are made up, as a small file is there at once.
  const answer = await (await fetch(`${url}/baton/models`)).json();
  answer.machines[2].folder.transfer = { number: 2, model: MODEL, is_copy: true, state: 'receiving', done_bytes: 1 << 20, total_bytes: 4 << 20 };
  await page.route('**/baton/models', (route) => (route.request().method() === 'GET' ? route.fulfill({ json: answer }) : route.continue()));
  await expect(page.getByRole('progressbar', { name: `${MODEL} to ${second}` })).toHaveAttribute('value', '0.25');
  await expect(card).toContainText('(25 %)');
  for (const width of [2560, 360]) {
    await page.setViewportSize({ width, height: 900 });
    await expectNoSidewaysScroll(page);
    await expectAccessible(page, `models, ${width} px`);
  }
  await page.unroute('**/baton/models');
  await expect(page.getByRole('progressbar')).toHaveCount(0);
  // A list that cannot be read is a problem until it can be read again.
  const problem = page.locator('section[aria-labelledby=models] [role=alert]');
  await page.route('**/baton/models', (route) => route.abort());
  await expect(problem).toHaveText('The endpoint cannot be reached.');
  await page.unroute('**/baton/models');
  await expect(problem).toHaveCount(0);

  await model.getByRole('button', { name: `Delete ${MODEL} on ${second}…` }).click();
  await model.getByRole('button', { name: `Delete on ${second}` }).click();
  await expect(model.locator('.places li')).toHaveCount(1);
  expect(await mac.files()).toEqual([]);

  const idle = page.locator('.modelrow', { hasText: 'idle' });
  await expect(idle).toContainText('not loaded');
  await idle.getByRole('button', { name: 'Load idle' }).click();
  await expect(idle).toContainText('loaded');
  await idle.getByRole('button', { name: 'Pin idle' }).click();
  await expect(idle).toContainText('loaded, ');
  await expect(idle).toContainText('stays');
  await idle.getByRole('button', { name: 'Unload idle' }).click();
  await expect(idle).toContainText('not loaded');
  // An order that is refused says why.
  await page.getByLabel('Pull from the hub').fill('no/such/name');
  await page.getByRole('button', { name: 'Pull', exact: true }).click();
  await expect(page.locator('section[aria-labelledby=models]')).toContainText(/no\/such\/name/);
  expect(problems).toEqual([]);
});

test('without leave of the configuration, models are only shown', async ({ page, problems, cluster }) => {
  const { cache } = await folder(1 << 20);
  const { url } = await cluster.serveWith({ BATON_CACHE: cache }, ...(await config(`[model]\nname = "sim"\n${SIM}`)));
  await page.goto(`${url}/#models`);
  await expect(page.locator('.files tbody tr')).toContainText(MODEL);
  await expect(page.locator('section[aria-labelledby=models] .notice')).toContainText('allow_model_management = true');
  await expect(page.getByRole('button', { name: /Delete|Copy|Pull/ })).toHaveCount(0);
  expect(problems).toEqual([]);
});
