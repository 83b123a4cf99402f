//! The line down from the node: what it orders, and what happens when it ends.
//!
//! It ends when the node is killed. The pager goes on: it has all that it needs for its programs,
//! and the donors that it knew. When another node adopts it, that one is handed what the one before
//! held, and listened to in its place.

use crate::config::{PagerConfig, PagerLeft, PagerOrder, PagerStart};
use crate::process::adoption::{AdoptionSocket, NodeStream};
use crate::process::channel::Receiver;
use crate::process::worker::Held;
use crate::shared::Shared;
use crate::state::Flag;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// State of the thread that listens to the node.
pub(crate) struct Lifeline {
    pub(crate) shared: Arc<Shared>,
    /// Configuration for a process that takes this one's place.
    pub(crate) config: Arc<Mutex<PagerConfig>>,
    pub(crate) own: Held,
    /// Set when no further program comes.
    pub(crate) launch_over: Arc<AtomicBool>,
    /// `None` if no other node is waited for.
    pub(crate) adoption: Option<AdoptionSocket>,
}

impl Lifeline {
    /// Runs as long as the process, or until there is nobody to listen to any more.
    pub(crate) fn run(mut self, mut receiver: Receiver) {
        loop {
            self.obey(&mut receiver);
            let Some(node) = self.next_node() else {
                self.launch_over.store(true, Relaxed);
                return;
            };
            receiver = node.receiver;
            if let Err(error) = self.hand_over(node.stream) {
                tracing::warn!(%error, "the node was gone before it had all that it is to hold");
            }
        }
    }

    /// Does what the node says, until it is gone.
    fn obey(&self, receiver: &mut Receiver) {
        loop {
            match receiver.receive() {
                Ok(Some(PagerOrder::LaunchOver)) => self.launch_over.store(true, Relaxed),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "what the node says is not understood");
                    return;
                }
            }
        }
    }

    fn next_node(&mut self) -> Option<NodeStream> {
        let adoption = self.adoption.as_mut()?;
        let patience = adoption.outlive().patience;
        tracing::warn!(?patience, "the node is gone; paging on until another comes");
        let mut came = adoption.wait(Some(patience));
        if matches!(came, Ok(None)) {
            // Launchers that might have started further programs have given up by now.
            self.launch_over.store(true, Relaxed);
            came = adoption.wait(None);
        }
        came.unwrap_or_else(|error| {
            tracing::error!(%error, "cannot wait for another node");
            None
        })
    }

    fn hand_over(&self, stream: UnixStream) -> std::io::Result<()> {
        let mut config = self.config.lock().expect("no thread panics with it").clone();
        config.outlive = self.adoption.as_ref().map(|socket| socket.outlive().clone());
        let launch_over = self.launch_over.load(Relaxed);
        // Held until all is sent: nothing comes or goes meanwhile.
        let core = self.shared.lock();
        let spaces = core.spaces.iter().flatten().flat_map(|space| space.held());
        let held: Vec<_> = self.own.labelled().into_iter().chain(spaces).collect();
        let left = PagerLeft {
            start: PagerStart { config, held: held.len() },
            restarts: core.stats.restarts,
            launch_over,
            leaving: core.state.is(Flag::Detaching),
        };
        core.guard.hand_over(stream, left, &held)
    }
}
