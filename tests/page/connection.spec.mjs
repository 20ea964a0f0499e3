// The stream of changes: when it is opened, and what the page says while there is none.
import { answerStreams, expect, test } from './browser.mjs';

const SIM = ['--engine', 'sim', '--name', 'sim'];

test('an endpoint that ends each stream at once is asked less and less often', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  const asked = await answerStreams(page, { version: '1' });
  await page.goto(url);
  await expect(page.getByRole('alert')).toContainText('Connection lost.');
  await page.waitForTimeout(5_000);
  // At 0, 0.5, 1.5, 3.5 and 7.5 s.
  expect(asked.length).toBeGreaterThan(2);
  expect(asked.length).toBeLessThanOrEqual(5);
  expect(problems).toEqual([]);
});

test('a stopping endpoint is no lost connection, until it is gone', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  const asked = await answerStreams(page, { version: '1', is_stopping: true });
  await page.goto(url);
  await expect(page.locator('.banner')).toContainText('The endpoint is stopping');
  await page.waitForTimeout(3_000);
  await expect(page.locator('.pill')).toHaveText('Stopping');
  await expect(page.getByRole('alert')).toHaveCount(0);
  expect(asked.length).toBe(1);
  await page.unroute('**/baton/state?stream=changes');
  await page.route('**/baton/state?stream=changes', (route) => route.abort('connectionrefused'));
  await expect(page.getByRole('alert')).toContainText('The endpoint was stopping, and no longer answers.');
  expect(problems).toEqual([]);
});

test('before any state, no age of it is shown', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  await page.route('**/baton/state?stream=changes', (route) => route.abort('connectionrefused'));
  await page.goto(url);
  await expect(page.getByRole('alert')).toContainText('The endpoint cannot be reached.');
  await expect(page.locator('.banner')).not.toContainText('What you see');
  expect(problems).toEqual([]);
});

test('a hidden tab has no stream', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  const streams = { asked: 0, ended: 0 };
  const isStream = (request) => request.url().includes('stream=changes');
  page.on('request', (request) => (streams.asked += isStream(request) ? 1 : 0));
  page.on('requestfailed', (request) => (streams.ended += isStream(request) ? 1 : 0));
  await page.goto(url);
  await expect(page.locator('.pill')).toHaveText('Live');
  const setHidden = (isHidden) =>
    page.evaluate((isHidden) => {
      Object.defineProperty(document, 'hidden', { value: isHidden, configurable: true });
      document.dispatchEvent(new Event('visibilitychange'));
    }, isHidden);
  await setHidden(true);
  await expect.poll(() => streams).toEqual({ asked: 1, ended: 1 });
  await page.waitForTimeout(2_000);
  expect(streams.asked).toBe(1);
  await expect(page.locator('.pill')).toHaveText('Connecting');
  await setHidden(false);
  await expect.poll(() => streams).toEqual({ asked: 2, ended: 1 });
  await expect(page.locator('.pill')).toHaveText('Live');
  expect(problems).toEqual([]);
});
