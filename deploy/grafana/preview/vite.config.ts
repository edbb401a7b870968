import { defineConfig } from 'vite';

// Relative addresses, so that any static server can serve the page.
export default defineConfig({
  base: './',
  build: { chunkSizeWarningLimit: 10_000, rollupOptions: { onwarn: () => undefined } },
});
