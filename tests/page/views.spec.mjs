// Every view: accessible in light and dark, readable on a phone and on a wall, usable by keyboard.
import { chat, longText } from './cluster.mjs';
import { expect, expectAccessible, expectNoSidewaysScroll, test } from './browser.mjs';

const THINKING = [
  { choices: [{ delta: { role: 'assistant', reasoning_content: 'The user wants the weather.' } }] },
  { choices: [{ delta: { content: 'I will ask.' } }] },
  { choices: [{ delta: { refusal: ' I cannot say.' } }] },
  { choices: [{ delta: { tool_calls: [{ index: 0, function: { name: 'get_weather', arguments: '{"city":' } }] } }] },
  { choices: [{ delta: { tool_calls: [{ index: 0, function: { arguments: '"Bern"}' } }] } }] },
  { choices: [{ delta: {}, finish_reason: 'tool_calls' }] },
];

/** A small cluster with some history: a handoff, a direct reply, and a node that is lost. */
async function busyCluster(cluster) {
  const sim = ['--engine', 'sim', '--name', 'sim', '--sim-decode-tps', '400'];
  const spark = await cluster.node('--role', 'prefill', ...sim, '--sim-prefill-tps', '20000');
  const gone = await cluster.node('--role', 'prefill', ...sim);
  const { url } = await cluster.serve(...sim, '--sim-prefill-tps', '4000', '--prefill', spark.url, '--prefill', gone.url, '--policy', 'always_handoff', '--no-calibration');
  await chat(url, longText(300, 'd'), { model: 'sim' });
  await gone.kill();
  await chat(url, longText(300, 'e'), { model: 'sim' });
  return url;
}

test('every view is accessible and fits every width', async ({ page, problems, cluster }) => {
  const url = await busyCluster(cluster);
  await page.route('**/v1/chat/completions', (route) => {
    const events = [...THINKING.map((chunk) => JSON.stringify(chunk)), '[DONE]'];
    route.fulfill({
      headers: { 'content-type': 'text/event-stream', 'x-baton-route': 'direct; decode=local; reason=only_route' },
      body: events.map((event) => `data: ${event}\n\n`).join(''),
    });
  });
  await page.goto(url);
  await expect(page.locator('.machine.down')).toBeVisible();
  await page.locator('.request button').first().click();
  await expect(page.locator('.chart')).toHaveCount(6);

  const views = {
    Overview: async () => {},
    Plan: async () => {
      await page.getByLabel('A prompt, or the JSON body').fill('What is this?');
      await page.getByRole('button', { name: 'Show the routes' }).click();
      await expect(page.locator('.plan tbody tr')).toHaveCount(3);
      await expect(page.locator('.plan')).toContainText('the prefill node cannot be reached');
      await expect(page.locator('.verdict')).toContainText('It would run on');
    },
    Models: async () => {
      await expect(page.locator('.card', { hasText: 'local' })).toBeVisible();
    },
    'Try it': async () => {
      await page.getByLabel('Message', { exact: true }).fill('What is the weather in Bern?');
      await page.getByRole('button', { name: 'Send' }).click();
      await expect(page.locator('.reasoning')).toContainText('Reasoning');
      await expect(page.locator('.call')).toContainText('get_weather');
      await expect(page.locator('.call pre')).toHaveText('{"city":"Bern"}');
      await expect(page.locator('.turn .text').last()).toHaveText('I will ask. I cannot say.');
      await page.locator('.settings summary').click();
    },
  };
  for (const [name, use] of Object.entries(views)) {
    await page.setViewportSize({ width: 1440, height: 1000 });
    await page.getByRole('link', { name, exact: true }).click();
    await use();
    for (const colorScheme of ['light', 'dark']) {
      await page.emulateMedia({ colorScheme });
      for (const width of [360, 1440, 2560]) {
        await page.setViewportSize({ width, height: 900 });
        await expectNoSidewaysScroll(page);
        await expectAccessible(page, `${name}, ${colorScheme}, ${width} px`);
      }
    }
  }
  expect(problems).toEqual([]);
});

test('the keyboard reaches everything', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve('--engine', 'sim', '--name', 'sim');
  await chat(url, 'hello', { model: 'sim' });
  await page.goto(url);
  await expect(page.locator('.request')).toHaveCount(1);
  const seen = [];
  for (let i = 0; i < 12; i += 1) {
    await page.keyboard.press('Tab');
    seen.push(await page.evaluate(() => document.activeElement.textContent || document.activeElement.getAttribute('aria-label')));
    if (seen.at(-1).includes('Done')) break;
  }
  expect(seen.slice(0, 6)).toEqual(['Skip to the content', 'Overview', 'Plan', 'Models', 'Operate', 'Try it']);
  await page.keyboard.press('Enter');
  await expect(page.locator('.details')).toBeVisible();
  await expect(page.locator('.request button')).toHaveAttribute('aria-expanded', 'true');
  expect(problems).toEqual([]);
});

test('another view or the skip link ends no reply and loses no text', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve('--engine', 'sim', '--name', 'sim', '--sim-decode-tps', '20');
  const view = (name) => page.getByRole('navigation').getByRole('link', { name });
  await page.goto(`${url}/#plan`);
  await page.getByLabel('A prompt, or the JSON body').fill('Keep this.');
  await view('Try it').click();
  await page.getByLabel('Message', { exact: true }).fill('Go on for a long time.');
  await page.getByLabel('Message', { exact: true }).press('Enter');
  const text = page.locator('.turn.assistant .text');
  await expect(text).not.toBeEmpty();
  const before = (await text.textContent()).length;

  await page.locator('.skip').focus();
  await page.keyboard.press('Enter');
  await expect(page.locator('#content')).toBeFocused();
  await expect(view('Try it')).toHaveAttribute('aria-current', 'page');
  await page.evaluate(() => (location.hash = 'nowhere'));
  await expect(view('Try it')).toHaveAttribute('aria-current', 'page');
  await expect(text).toBeVisible();

  await view('Overview').click();
  await expect(text).toBeHidden();
  await expect(page.locator('.request.running')).toHaveCount(1);
  await page.waitForTimeout(1000);
  await view('Try it').click();
  expect((await text.textContent()).length).toBeGreaterThan(before);
  await page.getByRole('button', { name: 'Stop' }).click();
  await view('Plan').click();
  await expect(page.getByLabel('A prompt, or the JSON body')).toHaveValue('Keep this.');
  await page.evaluate(() => (location.hash = ''));
  await expect(view('Overview')).toHaveAttribute('aria-current', 'page');
  expect(problems).toEqual([]);
});
