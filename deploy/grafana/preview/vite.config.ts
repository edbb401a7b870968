import { defineConfig } from 'vite';

// Relative addresses, so that any static server can serve the page; Grafana's icons lie beside it.
export default defineConfig({
  base: './',
  publicDir: 'node_modules/@grafana/ui/dist/public',
  build: { chunkSizeWarningLimit: 10_000, rollupOptions: { onwarn: () => undefined } },
});
