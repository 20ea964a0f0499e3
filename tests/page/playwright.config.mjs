import { defineConfig } from '@playwright/test';

// Debian's Chromium: Playwright's own builds are not downloaded.
const executablePath = process.env.CHROMIUM ?? '/usr/bin/chromium';

export default defineConfig({
  testDir: '.',
  projects: process.env.PAGE_PICTURES
    ? [{ name: 'pictures', testMatch: 'pictures.spec.mjs' }]
    : [
        { name: 'page', testMatch: '*.spec.mjs', testIgnore: ['pictures.spec.mjs', 'streams.spec.mjs'] },
        // The measurement of long tasks wants the machine for itself.
        { name: 'streams', testMatch: 'streams.spec.mjs', dependencies: ['page'] },
      ],
  outputDir: process.env.PAGE_RESULTS ?? 'test-results',
  reporter: [['list']],
  // Each file starts servers of its own. Much of the time is waiting, so two share two cores well.
  workers: 2,
  // Other clients' tests run meanwhile.
  timeout: 120_000,
  expect: { timeout: 30_000 },
  use: {
    launchOptions: { executablePath, args: ['--no-sandbox', '--disable-dev-shm-usage'] },
    viewport: { width: 1440, height: 1000 },
    trace: 'off',
  },
});
