/* Browsers do not start workers from disk. There, run the worker of the search in a hidden frame instead. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((resolve) => {
        this.frame.addEventListener("load", () => resolve(this.frame.contentWindow), { once: true });
      });
      // In the frame, `postMessage(data)` is the worker's answer, which goes to the page.
      const answer = "window.postMessage = (data) => parent.postMessage({ worker: data }, '*')";
      this.frame.srcdoc = `<script>${answer}<\/script><script src="${new URL(url, location)}"><\/script>`;
      document.documentElement.append(this.frame);
      window.addEventListener("message", (event) => {
        if (event.source === this.frame.contentWindow && "worker" in event.data)
          this.dispatchEvent(new MessageEvent("message", { data: event.data.worker }));
      });
    }

    postMessage(data) {
      // A dispatched event reaches the worker's listener; its own `postMessage` is taken.
      this.ready.then((frame) => frame.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
