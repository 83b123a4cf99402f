//! Tells the manager, once a second, how the node is, and learns which donors the cluster has.
//!
//! Soft state: a manager that starts anew knows everything after one second, and a node whose
//! manager is away goes on with the donors that it knew.

use crate::causes::with_causes;
use crate::cluster::endpoints::{Endpoints, Tried};
use crate::cluster::report::{HeartbeatAnswer, NodeReport};
use crate::node::Inner;
use crate::stop::{Bell, Stop};
use hecaton_pki::{Credentials, LastingAgent};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time between two heartbeats.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// How long a manager may take to answer one.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest answer that is read: a directory of some hundred thousand donors.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

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
    /// The manager cannot answer heartbeats now: another one leads, or nobody does yet, or its
    /// registry takes long to write.
    #[error("the manager at {url} answers no heartbeats at present: {reason}")]
    NotNow {
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
        /// Error of the HTTP request.
        source: Box<ureq::Error>,
    },
}

/// The way to a manager, or to whichever of several leads.
#[derive(Clone, Debug)]
pub struct ManagerLink {
    managers: Arc<Endpoints>,
    http: Arc<LastingAgent<Credentials>>,
}

impl ManagerLink {
    /// A manager at a base URL such as `http://127.0.0.1:7070`, or `https` with `credentials`; or
    /// several, with a comma between any two.
    pub fn new(urls: &str, credentials: Option<Arc<Credentials>>) -> ManagerLink {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .build();
        let http = Arc::new(LastingAgent::new(config, credentials));
        ManagerLink { managers: Arc::new(Endpoints::new(urls)), http }
    }

    /// Sends one heartbeat.
    pub fn beat(&self, report: &NodeReport) -> Result<HeartbeatAnswer, HeartbeatError> {
        self.managers.ask(|url| match self.beat_at(url, report) {
            Err(error @ (HeartbeatError::NotNow { .. } | HeartbeatError::Unreachable { .. })) => {
                Tried::Next(Err(error))
            }
            answer => Tried::Answer(answer),
        })
    }

    fn beat_at(&self, url: &str, report: &NodeReport) -> Result<HeartbeatAnswer, HeartbeatError> {
        let unreachable = |source| unreachable(url, source);
        let path = format!("{url}/v1/nodes/{}/heartbeat", report.name);
        let mut response = self.http.now().post(path).send_json(report).map_err(unreachable)?;
        if !response.status().is_success() {
            let (url, status) = (url.to_owned(), response.status());
            let text = response.body_mut().with_config().limit(MAX_REFUSAL_BYTES).read_to_string();
            let reason = text.unwrap_or_else(|_| format!("HTTP status {status}"));
            return Err(match status.as_u16() {
                503 | 504 => HeartbeatError::NotNow { url, reason },
                _ => HeartbeatError::Refused { url, reason },
            });
        }
        let body = response.body_mut().with_config().limit(MAX_ANSWER_BYTES);
        body.read_json().map_err(unreachable)
    }

    /// Tells the manager that the node `name` of life `boot` ends, so that it is not waited for.
    pub fn farewell(&self, name: &str, boot: u64) -> Result<(), HeartbeatError> {
        self.managers.ask(|url| {
            match self.http.now().delete(format!("{url}/v1/nodes/{name}?boot={boot}")).call() {
                Ok(answer) if answer.status().as_u16() == 503 => Tried::Next(Ok(())),
                Ok(_) => Tried::Answer(Ok(())),
                Err(source) => Tried::Next(Err(unreachable(url, source))),
            }
        })
    }
}

fn unreachable(url: &str, source: ureq::Error) -> HeartbeatError {
    HeartbeatError::Unreachable { url: url.to_owned(), source: Box::new(source) }
}

/// Which heartbeats have been sent, and which of them have ended, for those who wait until the
/// manager has heard.
#[derive(Debug, Default)]
pub(crate) struct Told {
    beats: Mutex<Beats>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct Beats {
    /// They are sent.
    is_open: bool,
    begun: u64,
    ended: u64,
}

impl Beats {
    /// Whether one has ended that began after so many others had, or none will.
    fn have_told(&self, begun_before: u64) -> bool {
        !self.is_open || self.ended > begun_before
    }
}

impl Told {
    /// Rings `bell`, and waits until a heartbeat has ended that began since: what has come to pass
    /// before is known to the manager then, if it answers. Not at all while none are sent, and no
    /// longer than two may take: one may be under way.
    pub(crate) fn wait(&self, bell: &Bell) {
        let beats = self.beats();
        let now = beats.begun;
        bell.ring();
        let is_untold = |beats: &mut Beats| !beats.have_told(now);
        let waited = self.changed.wait_timeout_while(beats, 2 * PATIENCE, is_untold);
        drop(waited.expect("no thread panics with it"));
    }

    /// From now on they are sent, or not any more.
    fn open(&self, is_open: bool) {
        self.beats().is_open = is_open;
        self.changed.notify_all();
    }

    fn begin(&self) {
        self.beats().begun += 1;
    }

    fn end(&self) {
        let mut beats = self.beats();
        beats.ended = beats.begun;
        self.changed.notify_all();
    }

    fn beats(&self) -> MutexGuard<'_, Beats> {
        self.beats.lock().expect("no thread panics with it")
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
        node: &Arc<Inner>,
    ) -> io::Result<Heartbeats> {
        let stop = Arc::new(Stop::default());
        let thread = thread::Builder::new().name("heartbeat".into()).spawn({
            let (stop, bell, link) = (Arc::clone(&stop), Arc::clone(&bell), link.clone());
            let node = Arc::downgrade(node);
            move || beat_until(&stop, &bell, &link, &node)
        })?;
        node.told.open(true);
        Ok(Heartbeats { stop, bell, link, thread })
    }

    /// Stops, with a farewell to the manager.
    pub(crate) fn stop(self, node: &Inner) {
        self.stop.set();
        self.bell.ring();
        let _ = self.thread.join();
        node.told.open(false);
        if let Err(error) = self.link.farewell(&node.name, node.boot) {
            tracing::debug!(%error, "no farewell");
        }
    }
}

fn beat_until(stop: &Stop, bell: &Bell, link: &ManagerLink, node: &Weak<Inner>) {
    let mut trouble = None;
    let mut divided = Instant::now();
    loop {
        let Some(node) = node.upgrade() else { return };
        // The bell rings between the seconds, too. Without a manager the node goes on with its
        // quota.
        if divided.elapsed() >= INTERVAL {
            divided = Instant::now();
            node.divide();
        }
        node.told.begin();
        let answer = link.beat(&node.heartbeat());
        node.told.end();
        match answer {
            Ok(answer) => {
                node.follow(&answer);
                node.directory.update(answer.list);
                if trouble.take().is_some() {
                    tracing::info!(managers = %link.managers, "the manager answers again");
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

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn only_a_heartbeat_that_began_later_tells() {
        let under_way = Beats { is_open: true, begun: 1, ended: 0 };
        assert!(!under_way.have_told(1));
        assert!(!Beats { ended: 1, ..under_way }.have_told(1), "it may have been said before");
        assert!(Beats { begun: 2, ended: 2, ..under_way }.have_told(1));
    }

    #[test]
    fn who_waits_has_the_bell_rung_and_nobody_waits_for_what_is_not_sent() {
        let (told, bell) = (Arc::new(Told::default()), Arc::new(Bell::default()));
        told.wait(&bell);
        told.open(true);
        bell.wait(LONG);
        let waiter = thread::spawn({
            let (told, bell) = (Arc::clone(&told), Arc::clone(&bell));
            move || {
                told.wait(&bell);
                told.beats().ended
            }
        });
        bell.wait(LONG);
        told.begin();
        told.end();
        assert_eq!(waiter.join().expect("joined"), 1);
    }
}
