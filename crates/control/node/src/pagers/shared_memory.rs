//! Runs a second pager per consumer for its programs' shared memory.
//!
//! `munmap` of a FUSE file writes the file back while it holds the program's mmap_lock, and the
//! programs' pager may wait for that lock. So another process must answer the write. See "Shared
//! memory" in docs/design.md.
//!
//! The second pager is the consumer `NAME.shared`. It starts when a program first asks for shared
//! memory. From then on both divide the consumer's local memory ([`super::parts`]). It ends after
//! the programs' pager. If it fails, the programs are ended.

use super::orders::ControlError;
use super::parts::{self, Part};
use super::{ConsumerReport, HeldFds, LastWord, Launcher, Pager, PagerError, Pagers};
use crate::causes::with_causes;
use crate::channel;
use hecaton_memory::{SpaceId, random_u64};
use hecaton_pager::{
    FILES_LISTENER_LABEL, LISTENER_LABEL, PagerConfig, PagerOrder, SharedMemoryOf, Stats,
};
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Period at which local memory is divided anew.
const LOOK: Duration = Duration::from_secs(1);

/// Time for a new node to adopt what an earlier one has left.
const ADOPTION_PATIENCE: Duration = Duration::from_secs(30);
const ADOPTION_POLL: Duration = Duration::from_millis(20);

/// Time for the pager of shared memory to end before the launcher of the programs returns.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// Ends the names of pagers of shared memory. A number follows if the name is taken.
const SUFFIX: &str = ".shared";
const MAX_SAME_NAMES: u32 = 99;
/// Longest name of a consumer, in bytes: see [`crate::report::check_name`].
const MAX_NAME: usize = 64;

/// The two pagers of a consumer, and their local limits in bytes.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    /// Name of the consumer and of its programs' pager.
    pub(super) own: String,
    /// Name of the pager of shared memory.
    pub(super) shared: String,
    pub(super) own_bytes: u64,
    pub(super) shared_bytes: u64,
    /// Limit of both together.
    pub(super) total_bytes: u64,
    /// Space of the programs' memory: it tells the consumer from a later one of the same name.
    space: u64,
    /// Locked by the thread that changes the limits.
    turn: Arc<Mutex<()>>,
}

impl Pagers {
    /// Starts the pager of shared memory of a consumer, unless it runs already.
    pub(super) fn shared_memory_wanted(&self, own: &str) {
        let (pagers, name) = (self.clone(), own.to_owned());
        let body = move || {
            if let Err(error) = pagers.serve_shared_memory(&name) {
                let error = with_causes(&error);
                tracing::error!(consumer = name, error, "cannot run a pager of shared memory");
                pagers.order(&name, &PagerOrder::SharedMemoryRefused(error));
            }
        };
        if let Err(error) = thread::Builder::new().name("shared-memory".into()).spawn(body) {
            tracing::error!(consumer = own, %error, "cannot run a pager of shared memory");
        }
    }

    /// Runs a pager of this consumer's shared memory to its end, unless one exists.
    fn serve_shared_memory(&self, own: &str) -> Result<(), PagerError> {
        self.wait_until_adopted();
        let Some(shared) = self.reserve_shared(own)? else { return Ok(()) };
        // The programs' pager may use all local memory: it must shrink first.
        let shrunk =
            self.resize_pair(own, |pair| (pair.total_bytes - pair.shared_bytes, pair.shared_bytes));
        if let Err(error) = shrunk {
            let error = with_causes(&error);
            tracing::warn!(consumer = own, error, "local limit is exceeded for now");
        }
        if let Err(error) = self.keep_divided(own) {
            tracing::error!(consumer = own, %error, "cannot divide local memory anew");
        }
        let (decided, outcome) = mpsc::sync_channel(1);
        self.supervise(&shared, None, &decided);
        let Ok(Err(reason)) = outcome.try_recv() else { return Ok(()) };
        if let Some(total) = self.with(own, |pager| pager.config.divided_bytes.take())?
            && let Err(error) = self.resize_pager(own, total)
        {
            tracing::warn!(consumer = own, error = with_causes(&error), "local limit stays lower");
        }
        Err(PagerError::Start { consumer: shared, reason })
    }

    /// An earlier node may have left a pager of shared memory.
    fn wait_until_adopted(&self) {
        let until = Instant::now() + ADOPTION_PATIENCE;
        while self.0.is_adopting.load(Relaxed) && Instant::now() < until {
            thread::sleep(ADOPTION_POLL);
        }
    }

    /// Enters a pager of shared memory in the table, and returns its name. `None` if the consumer
    /// has one.
    fn reserve_shared(&self, own: &str) -> Result<Option<String>, PagerError> {
        let mut table = self.table();
        if self.0.stop.is_set() {
            return Err(PagerError::Stopping);
        }
        if table.shared_of(own).is_some() {
            return Ok(None);
        }
        let shared = table.free_name_for_shared(own)?;
        table.started += 1;
        let number = table.started;
        let unknown = || PagerError::Unknown(own.to_owned());
        let pager = table.pagers.get_mut(own).filter(|pager| !pager.is_ending);
        let pager = pager.ok_or_else(unknown)?;
        let (label, fd) = pager
            .held
            .iter()
            .find(|(label, _)| *label == FILES_LISTENER_LABEL)
            .map(|(_, fd)| (LISTENER_LABEL.to_owned(), fd.try_clone_to_owned()))
            .ok_or_else(|| io::Error::other("the node does not hold the pager's files socket"))?;
        let mut held = HeldFds::default();
        held.hold(vec![label], vec![fd?]).map_err(io::Error::other)?;
        let shared_bytes = parts::first_shared(pager.config.local_bytes);
        pager.config.divided_bytes = Some(pager.config.local_bytes);
        let space = SpaceId(random_u64());
        let config = PagerConfig {
            consumer: shared.clone(),
            space: space.0,
            local_bytes: shared_bytes,
            socket: self.0.paths.pager_socket(number),
            shared_memory_of: Some(SharedMemoryOf {
                consumer: own.to_owned(),
                space: pager.config.space,
                socket: pager.config.socket.clone(),
            }),
            divided_bytes: None,
            donors: Vec::new(),
            outlive: self.outlive(number),
            ..pager.config.clone()
        };
        let report = ConsumerReport {
            name: shared.clone(),
            space,
            local_bytes: shared_bytes,
            ..ConsumerReport::default()
        };
        let pager = Pager {
            config,
            report,
            held,
            keepers: Vec::new(),
            target: None,
            launch_line: None,
            launch_over: false,
            launcher: Launcher::default(),
            shared_stats: None,
            dividing: Arc::default(),
            is_ending: false,
            has_lost: None,
            last_word: LastWord::None,
        };
        table.pagers.insert(shared.clone(), pager);
        Ok(Some(shared))
    }

    /// Ends the other of a consumer's two pagers. `error`: why the pager `ended` failed, if it did.
    pub(super) fn end_other(&self, ended: &str, error: Option<&str>) {
        let of = self.with(ended, |pager| {
            (pager.config.shared_memory_of.clone(), pager.report.stats.clone())
        });
        match of {
            Ok((Some(of), stats)) => self.end_programs(&of, stats, error),
            Ok((None, _)) => self.end_shared_memory_of(ended),
            Err(_) => {}
        }
    }

    /// Keeps the last statistics of the shared memory. If its pager failed, ends the programs.
    fn end_programs(&self, of: &SharedMemoryOf, stats: Option<Stats>, error: Option<&str>) {
        let order = error.map(|reason| PagerOrder::SharedMemoryLost(reason.to_owned()));
        let is_told = self.with(&of.consumer, |pager| {
            if pager.config.space != of.space {
                return;
            }
            pager.shared_stats = stats;
            pager.has_lost = order.clone();
            pager.say_what_is_lost();
        });
        if is_told.is_err() {
            tracing::debug!(consumer = of.consumer, "its programs have ended before");
        }
    }

    /// Gives an order to a consumer's pager, if one runs.
    fn order(&self, name: &str, order: &PagerOrder) {
        let sent = self.with(name, |pager| match &pager.launch_line {
            Some(line) => channel::send(line, order, &[]),
            None => Ok(()),
        });
        if let Ok(Err(error)) = sent {
            tracing::debug!(consumer = name, %error, "pager process took no order");
        }
    }

    /// Ends the pager of shared memory after the programs. Waits at most 2 s: a process outside the
    /// pool may use the memory for longer.
    fn end_shared_memory_of(&self, own: &str) {
        // From here on, none is started.
        let _ = self.with(own, |pager| pager.is_ending = true);
        let Some(Pair { shared, .. }) = self.pair(own) else { return };
        self.launch_over(&shared);
        let is_there = |table: &mut super::Table| table.pagers.contains_key(&shared);
        let (table, changed) = (self.table(), &self.0.changed);
        drop(changed.wait_timeout_while(table, END_PATIENCE, is_there));
    }

    /// Both pagers of a consumer. `None` if it has no pager of shared memory.
    pub(super) fn pair(&self, own: &str) -> Option<Pair> {
        let table = self.table();
        let shared = table.shared_of(own)?;
        let (one, other) = (table.pagers.get(own)?, table.pagers.get(shared)?);
        let (own_bytes, shared_bytes) = (one.config.local_bytes, other.config.local_bytes);
        let total_bytes = one.config.divided_bytes.unwrap_or(own_bytes + shared_bytes);
        Some(Pair {
            own: own.to_owned(),
            shared: shared.to_owned(),
            own_bytes,
            shared_bytes,
            total_bytes,
            space: one.config.space,
            turn: Arc::clone(&one.dividing),
        })
    }

    /// Divides a consumer's local memory, in a thread, as long as it has two pagers.
    pub(super) fn keep_divided(&self, own: &str) -> io::Result<()> {
        let (pagers, own) = (self.clone(), own.to_owned());
        let space = self.pair(&own).map(|pair| pair.space);
        let body = move || {
            let mut before = None;
            while !pagers.0.stop.wait(LOOK)
                && let Some(pair) = pagers.pair(&own)
                && Some(pair.space) == space
            {
                let counted = pagers.counted(&pair);
                if let (Some(then), Some(now)) = (before, counted) {
                    pagers.divide_anew(&pair, then, now);
                }
                before = counted;
            }
        };
        thread::Builder::new().name("local-memory".into()).spawn(body).map(drop)
    }

    /// Divides the local memory of consumers that this node adopted with two pagers.
    pub(super) fn divide_those_left(&self) {
        let of = |pager: &Pager| Some(pager.config.shared_memory_of.as_ref()?.consumer.clone());
        let divided: Vec<String> = self.table().pagers.values().filter_map(of).collect();
        for own in divided {
            if let Err(error) = self.keep_divided(&own) {
                tracing::error!(consumer = own, %error, "cannot divide local memory anew");
            }
        }
    }

    /// Local bytes, and pages ever fetched back, of each pager. `None` before both have reported.
    fn counted(&self, pair: &Pair) -> Option<[(u64, u64); 2]> {
        let of = |name: &str| {
            let stats = self.report(name).ok()?.stats?;
            Some((stats.local_bytes, stats.pages_in + stats.staging_faults))
        };
        Some([of(&pair.own)?, of(&pair.shared)?])
    }

    fn divide_anew(&self, pair: &Pair, then: [(u64, u64); 2], now: [(u64, u64); 2]) {
        let divided = self.resize_pair(&pair.own, |pair| {
            let part = |limit, i: usize| {
                let came_back = now[i].1.saturating_sub(then[i].1);
                Part { limit, used: now[i].0, came_back }
            };
            let shared = parts::divide(part(pair.own_bytes, 0), part(pair.shared_bytes, 1));
            // Both may have had more or less, since a pager did not shrink in time.
            let shared = shared.min(parts::most_shared(pair.total_bytes));
            (pair.total_bytes - shared, shared)
        });
        if let Err(error) = divided {
            tracing::debug!(consumer = pair.own, error = with_causes(&error), "not divided anew");
        }
    }

    /// Changes the local limits of both pagers. `wanted` gets the present limits, and returns those
    /// of the programs' pager and of the pager of shared memory.
    pub(super) fn resize_pair(
        &self,
        own: &str,
        wanted: impl FnOnce(&Pair) -> (u64, u64),
    ) -> Result<(), ControlError> {
        let unknown = || PagerError::Unknown(own.to_owned());
        let turn = self.pair(own).ok_or_else(unknown)?.turn;
        let _turn = turn.lock().expect("no thread panics with it");
        let pair = self.pair(own).ok_or_else(unknown)?;
        let (own, shared) = wanted(&pair);
        let mut steps =
            [(&pair.own, pair.own_bytes, own), (&pair.shared, pair.shared_bytes, shared)];
        // The pager that shrinks is first, so that both together stay within the limit.
        steps.sort_by_key(|(_, before, after)| after > before);
        let mut changes = steps.iter().filter(|(_, before, after)| before != after);
        changes.try_for_each(|(name, _, bytes)| self.resize_pager(name, *bytes))
    }
}

impl super::Table {
    /// The pager of this consumer's shared memory, if it has one.
    pub(super) fn shared_of(&self, own: &str) -> Option<&str> {
        let space = self.pagers.get(own)?.config.space;
        let is_it = |pager: &Pager| {
            let of = pager.config.shared_memory_of.as_ref();
            of.is_some_and(|of| of.consumer == own && of.space == space)
        };
        self.pagers.iter().find(|(_, pager)| is_it(pager)).map(|(name, _)| name.as_str())
    }

    fn free_name_for_shared(&self, own: &str) -> Result<String, PagerError> {
        let named = |number: u32| {
            let end = if number > 1 { format!("{SUFFIX}{number}") } else { SUFFIX.to_owned() };
            format!("{}{end}", &own[..own.len().min(MAX_NAME - end.len())])
        };
        let free = (1..MAX_SAME_NAMES).map(named).find(|name| !self.pagers.contains_key(name));
        let name = free.unwrap_or_else(|| named(MAX_SAME_NAMES));
        self.check_free(&name).map(|()| name)
    }
}

impl Pager {
    /// Has the programs ended if their shared memory is lost.
    pub(super) fn say_what_is_lost(&self) {
        if let (Some(order), Some(line)) = (&self.has_lost, &self.launch_line)
            && let Err(error) = channel::send(line, order, &[])
        {
            // The process has ended; its successor is told anew.
            tracing::debug!(%error, "pager process took no order");
        }
    }

    pub(super) fn set_local(&mut self, bytes: u64) {
        self.config.local_bytes = bytes;
        self.report.local_bytes = bytes;
    }
}
