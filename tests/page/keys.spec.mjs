// The operator's key: asked for once, kept in the tab, and refused with a sentence.
import { execFileSync } from 'node:child_process';
import { mkdtemp, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, expectAccessible, test } from './browser.mjs';
import { BATON } from './cluster.mjs';

const OWNER = "the owner's key";

/** An endpoint with an owner's key and a guest's. */
async function locked(cluster) {
  const [guest, ...lines] = execFileSync(BATON, ['key', 'new', '--name', 'guest'], { encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] }).split('\n');
  const file = join(await mkdtemp(join(tmpdir(), 'page-')), 'baton.toml');
  const config = `api_keys = ["${OWNER}"]\n[model]\nname = "sim"\n[model.engine]\nengine = "sim"\n`;
  await writeFile(file, config + lines.join('\n'));
  return { url: (await cluster.serve('--config', file)).url, guest };
}

async function enter(page, key) {
  await page.getByLabel('API key').fill(key);
  await page.getByRole('button', { name: 'Unlock' }).click();
}

test('without a key there is only the question for one', async ({ page, problems, cluster }) => {
  const { url, guest } = await locked(cluster);
  await page.goto(url);
  await expect(page.getByRole('heading', { name: 'This endpoint asks for a key' })).toBeVisible();
  await expect(page.locator('.machine')).toHaveCount(0);
  await expect(page.getByRole('alert')).toHaveCount(0);
  await expectAccessible(page, 'the question for a key');

  await enter(page, 'wrong');
  await expect(page.getByRole('alert')).toHaveText('The endpoint does not know this key.');

  await enter(page, guest);
  await expect(page.getByRole('alert')).toContainText('This key may not see the cluster.');
  await page.getByRole('link', { name: 'Try it' }).click();
  await page.getByLabel('Message', { exact: true }).fill('Hello');
  await page.getByRole('button', { name: 'Send' }).click();
  await expect(page.locator('.turn.assistant .route-of')).toContainText('local');

  await enter(page, OWNER);
  await page.getByRole('link', { name: 'Overview' }).click();
  await expect(page.locator('.machine')).toContainText('Ready');

  // Kept in this tab, and in no other.
  await page.reload();
  await expect(page.locator('.machine')).toContainText('Ready');
  const other = await page.context().newPage();
  await other.goto(url);
  await expect(other.getByLabel('API key')).toBeVisible();
  await page.getByRole('button', { name: 'Forget key' }).click();
  await expect(page.getByLabel('API key')).toBeVisible();
  expect(problems).toEqual([]);
});

test('a key is kept only if the endpoint knows it', async ({ page, problems, cluster }) => {
  const { url, guest } = await locked(cluster);
  const kept = () => page.evaluate(() => sessionStorage.getItem('baton-key'));
  await page.goto(`${url}/#try`);
  // No header can hold this one.
  await enter(page, 'Schlüssel 🔑');
  await expect(page.getByRole('alert')).toContainText('A key has only letters without accents');
  expect(await kept()).toBeNull();
  await page.reload();
  await enter(page, 'wrong');
  await expect(page.getByRole('alert')).toHaveText('The endpoint does not know this key.');
  expect(await kept()).toBeNull();
  await expect(page.getByLabel('Message', { exact: true })).toBeHidden();

  await enter(page, guest);
  await expect(page.locator('#chat-model')).toHaveValue('sim');
  expect(await kept()).toBe(guest);
  await enter(page, 'wrong again');
  await expect(page.getByRole('alert')).toHaveText('The endpoint does not know this key.');
  expect(await kept()).toBe(guest);

  // A key that was known once.
  await page.evaluate(() => sessionStorage.setItem('baton-key', 'old'));
  await page.reload();
  await expect(page.getByRole('alert')).toHaveText('The endpoint does not know this key.');
  await expect(page.getByLabel('Message', { exact: true })).toBeHidden();
  await enter(page, guest);
  await expect(page.locator('#chat-model')).toHaveValue('sim');
  expect(problems).toEqual([]);
});

test('the files come with strict headers, and only browsers get the page', async ({ request, cluster }) => {
  const { url } = await locked(cluster);
  expect(await (await request.get(url)).text()).toBe('Ollama is running');
  const document = await request.get(url, { headers: { accept: 'text/html' } });
  const headers = document.headers();
  expect(headers['content-security-policy']).toContain("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'");
  expect(headers['x-content-type-options']).toBe('nosniff');
  expect(headers['referrer-policy']).toBe('no-referrer');
  for (const [, file] of (await document.text()).matchAll(/(?:src|href)="\.(\/baton[^"]+)"/g)) {
    const first = await request.get(url + file);
    expect(first.status(), file).toBe(200);
    expect(first.headers()['content-encoding']).toBe('gzip');
    const again = await request.get(url + file, { headers: { 'if-none-match': first.headers().etag } });
    expect(again.status(), `${file} again`).toBe(304);
  }
});
