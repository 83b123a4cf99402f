//! How long `hecaton dev`, `node` and `manager` run: until a signal, or until whoever started them
//! is gone.
//!
//! The programs that use a node's memory, or its volumes, cannot go on without it. So the first
//! signal waits for them, and only the second one ends them.

use anyhow::Context as _;
use hecaton_node::Node;
use std::io::{self, Read};
use std::thread;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

/// How often a stopping node looks whether its consumers have ended.
const DRAIN_POLL: Duration = Duration::from_millis(50);

/// A daemon's runtime, and the signals that end it. They are caught from here on: one that comes
/// while the daemon starts ends it in good order once it has.
pub(crate) fn begin() -> anyhow::Result<(Runtime, EndSignals)> {
    // Two threads serve a cluster's heartbeats with ease.
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.context("cannot start threads")?;
    let within = runtime.enter();
    let signals = EndSignals::catch().context("cannot catch signals")?;
    drop(within);
    Ok((runtime, signals))
}

/// The signals that end a daemon.
pub(crate) struct EndSignals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl EndSignals {
    /// To be called within a runtime.
    fn catch() -> io::Result<EndSignals> {
        Ok(EndSignals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next of them.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }
}

/// Resolves when standard input is closed: the process at its other end is gone.
pub(crate) async fn stdin_closed() {
    let (closed, noticed) = oneshot::channel();
    // A thread of its own, because a blocking read would keep the runtime from ending.
    let reader = thread::Builder::new().name("stdin".into()).spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut ignored = [0u8; 256];
        while stdin.read(&mut ignored).is_ok_and(|count| count > 0) {}
        let _ = closed.send(());
    });
    if reader.is_ok() {
        let _ = noticed.await;
    }
}

/// Waits for the node's consumers to end, or for one more signal.
pub(crate) async fn drain(node: &Node, signals: &mut EndSignals) {
    let volumes = node.volumes().in_use();
    if !volumes.is_empty() {
        eprintln!(
            "hecaton: waiting for the clients of {} volume(s): {}; interrupt once more to \
             disconnect them",
            volumes.len(),
            volumes.join(", ")
        );
    }
    let count = node.pagers().count();
    if count > 0 {
        let names: Vec<_> = node.pagers().reports().into_iter().map(|one| one.name).collect();
        eprintln!(
            "hecaton: waiting for {count} program(s) that use the pool: {}; interrupt once more \
             to kill them",
            names.join(", ")
        );
    }
    tokio::select! {
        () = no_consumers(node) => {}
        () = signals.next() => {}
    }
}

/// Resolves when the node has no consumers, and nobody is connected to its volumes.
pub(crate) async fn no_consumers(node: &Node) {
    while node.pagers().count() > 0 || !node.volumes().in_use().is_empty() {
        tokio::time::sleep(DRAIN_POLL).await;
    }
}
