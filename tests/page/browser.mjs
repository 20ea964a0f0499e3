// A page that fails its test if it breaks its own Content-Security-Policy, throws, or logs an error.
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { test as base, expect } from '@playwright/test';
import axe from 'axe-core';
import { Cluster } from './cluster.mjs';

export { expect };

/** The absolute path of a folder with the page's files, which are then used instead of those in the binary. */
const DIST = process.env.PAGE_DIST;

async function showFolder(page, folder) {
  await page.route(/^[^?#]*(\/|\/baton\/page\/app\.(js|css))$/, async (route) => {
    const { pathname } = new URL(route.request().url());
    // The headers are the binary's, its policy among them.
    const headers = (await route.fetch()).headers();
    for (const name of ['content-encoding', 'content-length', 'etag']) delete headers[name];
    await route.fulfill({ headers, body: await readFile(join(folder, pathname === '/' ? 'index.html' : pathname)) });
  });
}

export const test = base.extend({
  cluster: async ({}, use) => {
    const cluster = new Cluster();
    await use(cluster);
    await cluster.stop();
  },
  /** Problems that are expected: a test empties the list before it ends. */
  problems: async ({ page }, use) => {
    const problems = [];
    page.on('pageerror', (error) => problems.push(`threw: ${error.message}`));
    page.on('console', (message) => {
      // Chromium logs each refused or broken request, too; tests look at what the page says about those.
      const isNetwork = message.text().startsWith('Failed to load resource') || message.text().includes('net::ERR_');
      if (message.type() === 'error' && !isNetwork) problems.push(`logged: ${message.text()}`);
    });
    if (DIST) await showFolder(page, DIST);
    await page.addInitScript(() => {
      window.violations = [];
      document.addEventListener('securitypolicyviolation', (event) => window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`));
    });
    await use(problems);
    problems.push(...(await page.evaluate(() => window.violations ?? []).catch(() => [])));
    expect(problems, 'nothing was thrown, logged as an error, or against the policy').toEqual([]);
  },
});

/** Answers each stream of changes with these events, and ends it. Returns the times of the requests. */
export async function answerStreams(page, ...events) {
  const asked = [];
  await page.route('**/baton/state?stream=changes', (route) => {
    asked.push(Date.now());
    const body = events.map((event) => `data: ${JSON.stringify({ at_ms: Date.now(), ...event })}\n\n`).join('');
    return route.fulfill({ headers: { 'content-type': 'text/event-stream' }, body });
  });
  return asked;
}

/** Checks what axe-core can check, on the page as it is now. */
export async function expectAccessible(page, what) {
  // Evaluated through the debugger, which the page's policy does not bind.
  await page.evaluate(axe.source);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ['violations'] }));
  const found = violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(' | ')}`);
  expect(found, what).toEqual([]);
}

export async function expectNoSidewaysScroll(page) {
  const { scroll, width } = await page.evaluate(() => ({ scroll: document.documentElement.scrollWidth, width: innerWidth }));
  expect(scroll, 'the page is no wider than its window').toBeLessThanOrEqual(width);
}

/** The row of the newest request whose text contains `words`. */
export function row(page, words) {
  return page.locator('.request', { hasText: words }).first();
}
