/** Repeats a request while the tab is seen: a hidden tab asks nothing, and a server that is gone ever more seldom. */

const SLOWEST_MS = 30_000;

export class Live {
  /** `load(signal, previous)` returns the data, `every(data)` the pause until the next one; `changed()` is called. */
  constructor(load, every, changed) {
    Object.assign(this, { load, every, changed, data: null, error: null, at: 0 });
    this.stopping = new AbortController();
    this.wake = () => {};
    const onVisible = () => document.hidden || this.wake();
    document.addEventListener("visibilitychange", onVisible, { signal: this.stopping.signal });
    this.run();
  }

  stop() {
    this.stopping.abort();
    this.wake();
  }

  /** Ask now. */
  refresh() {
    this.isDue = true;
    this.wake();
  }

  async run() {
    let failures = 0;
    while (!this.stopping.signal.aborted) {
      this.isDue = false;
      try {
        this.data = await this.load(this.stopping.signal, this.data);
        this.at = Date.now();
        this.error = null;
        failures = 0;
      } catch (error) {
        if (this.stopping.signal.aborted) return;
        this.error = error;
        failures += 1;
      }
      if (this.stopping.signal.aborted) return;
      this.changed();
      await this.pause(Math.min(SLOWEST_MS, this.every(this.data) * 2 ** failures));
    }
  }

  async pause(milliseconds) {
    if (this.isDue) return;
    const until = Date.now() + milliseconds;
    do {
      await new Promise((resolve) => {
        this.wake = resolve;
        if (!document.hidden) setTimeout(resolve, Math.max(0, until - Date.now()));
      });
    } while (!this.isDue && !this.stopping.signal.aborted && (document.hidden || Date.now() < until));
  }
}
