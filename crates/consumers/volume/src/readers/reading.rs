//! A volume that is read here, and is another process's.

use super::leases::{Standing, Tenure};
use super::{SharedBy, now};
use crate::attach::{Attachment, Client, Held, Role};
use crate::requests::page_locks::Access;
use crate::volume::{Volume, VolumeConfig};
use crate::{BlockError, State};
use hecaton_memory::random_u64;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a client that comes waits for a lease, or for fresh tables.
const ATTACHING: Duration = Duration::from_secs(3);

/// How long its owner may take to hear that it is left.
const LEAVING: Duration = Duration::from_secs(4);

/// How often what is not found, or comes damaged, is looked for anew.
const ATTEMPTS: u32 = 4;

/// How long one look may take.
const LOOK: Duration = Duration::from_secs(2);

/// State of a volume that another process has and this one reads.
pub(crate) struct Reading {
    pub(super) from: SharedBy,
    pub(super) session: u64,
    known: Mutex<Known>,
    changed: Condvar,
    /// Held while a client is attached, and while tables are replaced.
    pub(super) gate: Mutex<()>,
}

struct Known {
    tenure: Tenure,
    /// All segments' whereabouts have been told.
    is_placed: bool,
    /// Answers so far.
    rounds: u64,
    /// Somebody waits for the next one.
    is_wanted: bool,
    /// Its owner is followed.
    is_followed: bool,
}

impl Reading {
    /// With tables of an earlier process, or that were fetched just now.
    pub(crate) fn new(from: SharedBy, state: &State) -> Reading {
        let tenure = Tenure::of_tables(state.edition());
        let known =
            Known { tenure, is_placed: false, rounds: 0, is_wanted: false, is_followed: false };
        let (known, changed) = (Mutex::new(known), Condvar::new());
        Reading { from, session: random_u64(), known, changed, gate: Mutex::default() }
    }

    pub(super) fn granted(&self, asked_at: Duration, edition: u64, is_all: bool) {
        let mut known = self.known();
        known.tenure.granted(asked_at, edition);
        known.is_placed |= is_all;
        self.answered(known);
    }

    pub(super) fn refused(&self, why: String) {
        let mut known = self.known();
        known.tenure.refused(why);
        self.answered(known);
    }

    fn answered(&self, mut known: MutexGuard<'_, Known>) {
        known.rounds += 1;
        drop(known);
        self.changed.notify_all();
    }

    pub(super) fn set_tables(&self, edition: u64) {
        self.known().tenure.set_tables(edition);
        self.changed.notify_all();
    }

    pub(super) fn tables(&self) -> u64 {
        self.known().tenure.tables()
    }

    /// Waits before the next renewal, unless somebody wants it at once.
    pub(super) fn pause(&self, longest: Duration) {
        let waited =
            self.changed.wait_timeout_while(self.known(), longest, |known| !known.is_wanted);
        waited.expect("no thread panics with it").0.is_wanted = false;
    }

    /// Its owner is followed from now on, or is not.
    pub(super) fn set_followed(&self, is_followed: bool) {
        self.known().is_followed = is_followed;
        self.changed.notify_all();
    }

    /// Returns when its owner has been told that nothing is answered here any more, or does not
    /// hear it. The volume is over.
    pub(crate) fn leave(&self) {
        let mut known = self.known();
        known.is_wanted = true;
        self.changed.notify_all();
        let waited = self.changed.wait_timeout_while(known, LEAVING, |known| {
            known.is_wanted |= known.is_followed;
            known.is_followed
        });
        drop(waited.expect("no thread panics with it"));
    }

    /// Waits until its owner has answered once more, or for long enough.
    fn look_again(&self) {
        let mut known = self.known();
        // The one that is under way may have been asked before.
        let until = known.rounds + 2;
        let began = Instant::now();
        while known.rounds < until && began.elapsed() < LOOK {
            known.is_wanted = true;
            self.changed.notify_all();
            let waited = self.changed.wait_timeout(known, LOOK / 10);
            known = waited.expect("no thread panics with it").0;
        }
    }

    /// The edition of the tables, from which may be answered at this moment.
    fn held(&self) -> Option<u64> {
        let known = self.known();
        let holds = known.is_placed && known.tenure.standing(now()) == Standing::Holds;
        holds.then(|| known.tenure.tables())
    }

    /// Waits until `until` for an edition as `held` returns it, unless `is_final` says that it is
    /// in vain.
    fn hold(&self, until: Instant, is_final: fn(&Standing) -> bool) -> Result<u64, String> {
        let mut known = self.known();
        loop {
            let standing = known.tenure.standing(now());
            if standing == Standing::Holds && known.is_placed {
                return Ok(known.tenure.tables());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || is_final(&standing) {
                return Err(self.in_words(&standing));
            }
            // A lease ends without a word.
            let waited = self.changed.wait_timeout(known, left.min(LOOK / 10));
            known = waited.expect("no thread panics with it").0;
        }
    }

    fn in_words(&self, standing: &Standing) -> String {
        let node = &self.from.node;
        match standing {
            Standing::Refused(why) => format!("node `{node}` does not let it be read: {why}"),
            Standing::Outdated => format!(
                "it was opened for writing at node `{node}` since; it is read anew when nobody is attached to it here any \
                 more"
            ),
            Standing::Silent | Standing::Holds => {
                format!("node `{node}`, which has it, does not answer")
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().expect("no thread panics with it")
    }
}

impl Volume {
    /// Runs `ask`, which asks the tables, or donors by them. If another process has the volume, the
    /// result counts only with a lease before and after. If pages are not found, `ask` runs again.
    pub(crate) fn leased<T>(
        &self,
        at: u64,
        mut ask: impl FnMut() -> Result<T, (u64, BlockError)>,
    ) -> Result<T, (u64, BlockError)> {
        let Some(reading) = &self.reading else { return ask() };
        let until = Instant::now() + self.config().donor_patience;
        let is_final =
            |standing: &Standing| matches!(standing, Standing::Refused(_) | Standing::Outdated);
        let mut attempts = 0;
        loop {
            if self.is_over() {
                return Err((at, BlockError::Over));
            }
            let held = reading.hold(until, is_final);
            let edition = held.map_err(|reason| (at, BlockError::Unheld(reason)))?;
            let asked = ask();
            if reading.held() != Some(edition) {
                continue;
            }
            let (from, error) = match asked {
                Ok(found) => return Ok(found),
                Err(failed) => failed,
            };
            let is_moved = match &error {
                BlockError::Pool(error) if error.is_transient() => Instant::now() < until,
                // Another process of its owner may be there, which is told.
                BlockError::Pool(_) | BlockError::Damaged(_) | BlockError::Over => {
                    attempts += 1;
                    attempts < ATTEMPTS
                }
                _ => false,
            };
            if !is_moved {
                return Err((from, error));
            }
            reading.look_again();
        }
    }

    /// Lets a client in that reads.
    pub(crate) fn attach_reading(
        &self,
        reading: &Reading,
        client: Client,
        role: Role,
    ) -> Result<Attachment, Held> {
        if role == Role::Writer {
            return Err(Held::Elsewhere(reading.from.node.clone()));
        }
        if reading.held().is_none() {
            reading.look_again();
        }
        reading.hold(Instant::now() + ATTACHING, |_| false).map_err(Held::NotHeld)?;
        let _gate = reading.gate.lock().expect("no thread panics with it");
        self.attachments.attach(client, role)
    }

    /// Keeps the tables as they are, for as long as what may have cached something of them is
    /// exported. Nothing where the volume is this process's own.
    pub fn pin(&self) -> Option<Attachment> {
        let reading = self.reading.as_ref()?;
        let is_begun = reading.known().is_placed;
        let attached = is_begun
            .then(|| self.attach_reading(reading, Client::Export, Role::Reader).ok())
            .flatten();
        // It is there, whether it can be read or not.
        attached.or_else(|| self.attachments.attach(Client::Export, Role::Reader).ok())
    }

    /// Why it cannot be read here at this moment, if it cannot.
    pub(crate) fn why_unheld(&self) -> Option<String> {
        let reading = self.reading.as_ref()?;
        let known = reading.known();
        match known.tenure.standing(now()) {
            Standing::Holds if known.is_placed => None,
            standing => Some(reading.in_words(&standing)),
        }
    }

    /// Returns when donors have all that was ever written, with nobody attached who writes.
    pub(crate) fn come_to_rest(&self) -> Result<(), String> {
        // A writer that has just gone may have requests in flight.
        let lock = self.locks.lock(0..self.state.pages(), Access::Shared);
        drop(lock.map_err(|_| BlockError::Stuck.to_string())?);
        self.flush().map_err(|error| error.to_string())?;
        match self.is_settled() {
            true => Ok(()),
            false => Err(BlockError::Stuck.to_string()),
        }
    }
}

impl VolumeConfig {
    /// Why other nodes cannot read it by themselves, if they cannot.
    pub fn why_not_shared(&self) -> Option<String> {
        let why = if let Some(from) = &self.reads_from {
            return Some(format!("it is node `{}`'s, and read here", from.node));
        } else if self.multi_writer {
            "it was created with --multi-writer, and whoever reads it beside writers does so through its one process"
        } else if self.spill.is_some() {
            "what is in its spill file only this host has"
        } else if self.for_swap {
            "this host's kernel swaps to it"
        } else {
            return None;
        };
        Some(why.to_owned())
    }
}
