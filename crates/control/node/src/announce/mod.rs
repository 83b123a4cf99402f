//! Finds donors without a manager, by announcements on the network.
//!
//! Once a second each node announces its donors, and it uses the donors that other nodes announce.
//! Announcements are soft state, like heartbeats. A node that is silent for
//! [`heard::SILENT_AFTER`] is no longer offered, and a node that ends says so. Datagrams may be
//! lost, doubled or out of order; each contains the complete list. A node believes a datagram if
//! its sender has the key that all nodes share: see [`announcement`].
//!
//! | module | what it is about |
//! |---|---|
//! | [`announcement`] | a datagram's bytes, and whose they are |
//! | [`heard`] | which donors there are, as far as was heard: decisions only |
//! | `network` | the sockets |

pub mod announcement;
pub mod heard;
mod network;

pub use announcement::Key;
pub use network::{AnnounceError, Network, NetworkError};

use crate::node::Inner;
use crate::stop::Stop;
use announcement::Announcement;
use heard::Heard;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time between two announcements of a node.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// Time between two lines in the log about announcements that are ignored.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(60);

/// The threads that tell and hear.
#[derive(Debug)]
pub(crate) struct Announcements {
    stop: Arc<Stop>,
    network: Arc<Network>,
    threads: Vec<JoinHandle<()>>,
}

impl Announcements {
    /// Tells of the node's donors, if it has any, and hears of those of others.
    pub(crate) fn start(network: Network, node: &Arc<Inner>) -> io::Result<Announcements> {
        let mut started = Announcements {
            stop: Arc::new(Stop::default()),
            network: Arc::new(network),
            threads: Vec::new(),
        };
        let (stop, network) = (&started.stop, &started.network);
        let hear = {
            let (stop, network) = (Arc::clone(stop), Arc::clone(network));
            let node = Arc::downgrade(node);
            move || hear_until(&stop, &network, &node)
        };
        let tell = {
            let (stop, network) = (Arc::clone(stop), Arc::clone(network));
            let node = Arc::downgrade(node);
            move || tell_until(&stop, &network, &node)
        };
        let hearing = thread::Builder::new().name("announce-hear".into()).spawn(hear);
        let telling = thread::Builder::new().name("announce-tell".into()).spawn(tell);
        for thread in [hearing, telling] {
            match thread {
                Ok(thread) => started.threads.push(thread),
                Err(error) => {
                    started.join();
                    return Err(error);
                }
            }
        }
        Ok(started)
    }

    /// Ends both, with a farewell to whoever hears it.
    pub(crate) fn stop(mut self, node: &Inner) {
        self.join();
        // Later than all before, whatever their numbers are.
        let farewell = Announcement::of(&node.report(), Announcement::LAST, &self.network);
        if let Err(error) = self.network.tell(&Announcement { donors: Vec::new(), ..farewell }) {
            tracing::debug!(%error, "no farewell to the network");
        }
    }

    fn join(&mut self) {
        self.stop.set();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn tell_until(stop: &Stop, network: &Network, node: &Weak<Inner>) {
    let mut trouble = None;
    for number in 0.. {
        let Some(node) = node.upgrade() else { return };
        match network.tell(&Announcement::of(&node.report(), number, network)) {
            Ok(()) => trouble = None,
            Err(error) => {
                // Once for each kind of trouble, and not every second.
                let text = error.to_string();
                if trouble.as_ref() != Some(&text) {
                    tracing::warn!("{text}; trying again each second");
                    trouble = Some(text);
                }
            }
        }
        drop(node);
        if stop.wait(INTERVAL) {
            return;
        }
    }
}

fn hear_until(stop: &Stop, network: &Network, node: &Weak<Inner>) {
    let begun = Instant::now();
    let mut heard = Heard::default();
    let mut complaint_from = Duration::ZERO;
    while !stop.is_set() {
        let news = network.hear();
        let Some(node) = node.upgrade() else { return };
        let now = begun.elapsed();
        let taken = match news {
            Ok(Some(news)) if news.node != node.name => heard.hear(now, news).map_err(Into::into),
            // Its own; or nothing, and those that fell silent go from the directory all the same.
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        // Limits the rate of log lines, since a sender of invalid datagrams repeats them.
        if let Err(error) = taken
            && now >= complaint_from
        {
            tracing::warn!(%error, "an announcement is ignored");
            complaint_from = now + COMPLAINT_INTERVAL;
        }
        node.directory.update_announced(heard.donors(now));
    }
}
