//! Tells the manager, once a second, how the node is, and learns which donors the cluster has.
//!
//! Soft state: a manager that starts anew knows everything after one second, and a node whose
//! manager is away goes on with the donors that it knew.

use crate::causes::with_causes;
use crate::node::Inner;
use crate::report::{HeartbeatAnswer, NodeReport};
use crate::stop::{Bell, Stop};
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Time between two heartbeats.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// How long a manager may take to answer one.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest answer that is read: a directory of some ten thousand donors.
const MAX_ANSWER_BYTES: u64 = 4 << 20;

/// Longest refusal that is read.
const MAX_REFUSAL_BYTES: u64 = 4 << 10;

/// Why a heartbeat had no effect.
#[derive(Debug, thiserror::Error)]
pub enum HeartbeatError {
    /// The manager refused the node.
    #[error("the manager at {url} refuses this node: {reason}")]
    Refused {
        /// The manager's base URL.
        url: String,
        /// Its own words.
        reason: String,
    },
    /// The manager does not answer, or not as a manager does.
    #[error("no manager answers at {url}")]
    Unreachable {
        /// The manager's base URL.
        url: String,
        /// What went wrong.
        source: Box<ureq::Error>,
    },
}

/// The way to a manager.
#[derive(Clone, Debug)]
pub struct ManagerLink {
    url: String,
    http: ureq::Agent,
}

impl ManagerLink {
    /// A manager at a base URL such as `http://127.0.0.1:7070`.
    pub fn new(url: &str) -> ManagerLink {
        let http = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .build()
            .new_agent();
        ManagerLink { url: url.trim_end_matches('/').to_owned(), http }
    }

    /// Sends one heartbeat.
    pub fn beat(&self, report: &NodeReport) -> Result<HeartbeatAnswer, HeartbeatError> {
        let unreachable = |source| self.unreachable(source);
        let path = format!("{}/v1/nodes/{}/heartbeat", self.url, report.name);
        let mut response = self.http.post(path).send_json(report).map_err(unreachable)?;
        if !response.status().is_success() {
            let status = response.status();
            let text = response.body_mut().with_config().limit(MAX_REFUSAL_BYTES).read_to_string();
            let reason = text.unwrap_or_else(|_| format!("HTTP status {status}"));
            return Err(HeartbeatError::Refused { url: self.url.clone(), reason });
        }
        let body = response.body_mut().with_config().limit(MAX_ANSWER_BYTES);
        body.read_json().map_err(unreachable)
    }

    /// Tells the manager that the node `name` of life `boot` ends, so that it is not waited for.
    pub fn farewell(&self, name: &str, boot: u64) -> Result<(), HeartbeatError> {
        let path = format!("{}/v1/nodes/{name}?boot={boot}", self.url);
        let answer = self.http.delete(path).call();
        answer.map(|_| ()).map_err(|source| self.unreachable(source))
    }

    fn unreachable(&self, source: ureq::Error) -> HeartbeatError {
        HeartbeatError::Unreachable { url: self.url.clone(), source: Box::new(source) }
    }
}

/// The thread that sends them.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    stop: Arc<Stop>,
    bell: Arc<Bell>,
    link: ManagerLink,
    thread: JoinHandle<()>,
}

impl Heartbeats {
    /// Sends one each [`INTERVAL`], and one when `bell` rings.
    pub(crate) fn start(
        link: ManagerLink,
        bell: Arc<Bell>,
        node: Weak<Inner>,
    ) -> io::Result<Heartbeats> {
        let stop = Arc::new(Stop::default());
        let thread = thread::Builder::new().name("heartbeat".into()).spawn({
            let (stop, bell, link) = (Arc::clone(&stop), Arc::clone(&bell), link.clone());
            move || beat_until(&stop, &bell, &link, &node)
        })?;
        Ok(Heartbeats { stop, bell, link, thread })
    }

    /// Stops, with a farewell to the manager.
    pub(crate) fn stop(self, node: &Inner) {
        self.stop.set();
        self.bell.ring();
        let _ = self.thread.join();
        if let Err(error) = self.link.farewell(&node.name, node.boot) {
            tracing::debug!(%error, "no farewell");
        }
    }
}

fn beat_until(stop: &Stop, bell: &Bell, link: &ManagerLink, node: &Weak<Inner>) {
    let mut trouble = None;
    loop {
        let Some(node) = node.upgrade() else { return };
        match link.beat(&node.report()) {
            Ok(answer) => {
                node.follow(&answer);
                node.directory.update(answer.donors);
                if trouble.take().is_some() {
                    tracing::info!(url = link.url, "the manager answers again");
                }
            }
            Err(error) => {
                // Once for each kind of trouble, and not every second.
                let text = with_causes(&error);
                if trouble.as_ref() != Some(&text) {
                    tracing::warn!("{text}; trying again each second");
                    trouble = Some(text);
                }
            }
        }
        drop(node);
        bell.wait(INTERVAL);
        if stop.is_set() {
            return;
        }
    }
}
