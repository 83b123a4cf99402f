//! The pagers: one process per consumer, started on request. How each is kept running is the
//! supervisor's affair.

mod orphans;
mod supervisor;
#[cfg(test)]
mod tests;

use crate::channel;
use crate::children::child::{ChildCommand, Running, Target};
use crate::children::held::HeldFds;
use crate::cluster::donor_directory::DonorDirectory;
use crate::cluster::report::check_name;
use crate::node_dir::NodePaths;
use crate::socket::message::{PagerAddress, PagerEnd, PagerStats, StartPager};
use crate::stop::{Bell, Stop};
use hecaton_memory::{SpaceId, random_u64};
use hecaton_pager::adoption::Outlive;
use hecaton_pager::{PagerConfig, PagerOrder, Placement, Stats};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

pub(crate) use orphans::LeftVm;

/// Most consumers of one node.
pub const MAX_PAGERS: usize = 256;

/// How long a pager may take until it listens.
const START_PATIENCE: Duration = Duration::from_secs(20);

/// How long a pager that was told to end may take before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// State of a pager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagerState {
    /// Its process is being started, or started again.
    #[default]
    Starting,
    /// It serves faults.
    Serving,
    /// Its launcher is done: it ends when the last process that uses it does.
    Ending,
}

/// A consumer, as the node reports it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ConsumerReport {
    /// The consumer's name.
    pub name: String,
    /// The space that holds its pages.
    pub space: SpaceId,
    /// State of its pager.
    pub state: PagerState,
    /// The pager's process, while there is one.
    pub pid: Option<u32>,
    /// How often the pager was started again by the node.
    pub restarts: u64,
    /// Most bytes of the consumer's memory that stay on this host.
    pub local_bytes: u64,
    /// Descriptors that the node holds for the pager.
    pub held_fds: usize,
    /// The pager's last statistics; `None` before the first.
    pub stats: Option<Stats>,
}

/// Why a pager is not started, or not to be found.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// The name cannot be one.
    #[error(transparent)]
    Name(#[from] crate::cluster::report::NameError),
    /// The name is in use.
    #[error("the node has a consumer `{0}` already; give this one another name with --name")]
    NameTaken(String),
    /// There are [`MAX_PAGERS`].
    #[error("the node serves {MAX_PAGERS} consumers, and takes no more; wait for one to end")]
    TooMany,
    /// The node is about to end.
    #[error("the node is stopping; start the program again when it is back")]
    Stopping,
    /// The process could not be started, or said why it does not serve.
    #[error("the pager of `{consumer}` does not start: {reason}; its log is on the node's stderr")]
    Start {
        /// The consumer's name.
        consumer: String,
        /// The pager's reason, how its process ended, or that it timed out.
        reason: String,
    },
    /// No such consumer.
    #[error("the node has no consumer `{0}`")]
    Unknown(String),
    /// The kernel refuses.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Called once, when the pager has ended.
pub type OnEnd = Box<dyn FnOnce(PagerEnd) + Send>;

/// The launcher to tell of the pager's end; `None` if it belonged to an earlier node.
#[derive(Default)]
struct Launcher(Option<OnEnd>);

impl fmt::Debug for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "there" } else { "none" })
    }
}

/// All pagers of a node.
#[derive(Clone, Debug)]
pub struct Pagers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    command: ChildCommand,
    paths: NodePaths,
    donors: Arc<DonorDirectory>,
    /// Copies of each page where nothing is said of them.
    copies: u8,
    /// How long pagers outlive this node, if they do.
    adopt_within: Option<Duration>,
    table: Mutex<Table>,
    /// Notified when an entry of the table changes or goes.
    changed: Condvar,
    stop: Stop,
    /// Rung when a consumer comes or goes.
    news: Arc<Bell>,
}

#[derive(Debug, Default)]
struct Table {
    started: u32,
    pagers: BTreeMap<String, Pager>,
}

#[derive(Debug)]
struct Pager {
    config: PagerConfig,
    report: ConsumerReport,
    held: HeldFds,
    target: Option<Target>,
    /// The pager's standard input.
    launch_line: Option<UnixStream>,
    launch_over: bool,
    launcher: Launcher,
    /// The pager's own word on its end.
    last_word: LastWord,
}

/// A pager's last message before its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum LastWord {
    /// Nothing.
    #[default]
    None,
    /// It ends in peace.
    Peace,
    /// It does not, and why.
    Failure(String),
}

impl Table {
    fn check_free(&self, name: &str) -> Result<(), PagerError> {
        if self.pagers.contains_key(name) {
            return Err(PagerError::NameTaken(name.to_owned()));
        }
        if self.pagers.len() >= MAX_PAGERS {
            return Err(PagerError::TooMany);
        }
        Ok(())
    }
}

impl Pager {
    fn enter(&mut self, process: &Running) {
        self.target = Some(process.target());
        self.report.pid = Some(process.pid());
    }

    /// Tells the process that no further program comes.
    fn say_launch_over(&self) {
        if let Some(line) = &self.launch_line
            && let Err(error) = channel::send(line, &PagerOrder::LaunchOver, &[])
        {
            // It has ended; another that is started is told anew.
            tracing::debug!(%error, "pager process took no order");
        }
    }
}

impl Pagers {
    /// No pagers yet.
    pub fn new(
        command: ChildCommand,
        paths: NodePaths,
        donors: Arc<DonorDirectory>,
        copies: u8,
        adopt_within: Option<Duration>,
    ) -> Pagers {
        Pagers(Arc::new(Shared {
            command,
            paths,
            donors,
            copies,
            adopt_within,
            table: Mutex::default(),
            changed: Condvar::new(),
            stop: Stop::default(),
            news: Arc::default(),
        }))
    }

    /// Starts a pager and waits until it listens; `monitor` is that of its machine. `on_end` is
    /// called if and only if this succeeds.
    pub fn start(
        &self,
        wish: &StartPager,
        monitor: Option<PathBuf>,
        on_end: OnEnd,
    ) -> Result<PagerAddress, PagerError> {
        check_name(&wish.name)?;
        let config = self.reserve(wish, monitor, Launcher(Some(on_end)))?;
        let (decided, outcome) = mpsc::sync_channel(1);
        let supervisor = {
            let (pagers, name) = (self.clone(), wish.name.clone());
            move || pagers.supervise(&name, None, &decided)
        };
        let spawned = thread::Builder::new().name("pager-supervisor".into()).spawn(supervisor);
        if let Err(error) = spawned {
            self.forget(&wish.name);
            return Err(error.into());
        }
        let fail = |reason: String| PagerError::Start { consumer: wish.name.clone(), reason };
        match outcome.recv_timeout(START_PATIENCE) {
            Ok(Ok(pid)) => {
                let PagerConfig { socket, key, .. } = config;
                Ok(PagerAddress { name: wish.name.clone(), socket, key, pid })
            }
            Ok(Err(reason)) => Err(fail(reason)),
            Err(_) => {
                // The supervisor learns from the hung-up channel that nobody waits any more.
                drop(outcome);
                self.signal(&wish.name, Signal::KILL);
                Err(fail(format!("it does not listen after {} s", START_PATIENCE.as_secs())))
            }
        }
    }

    /// The launcher starts no further program: the pager ends when the last one has.
    pub fn launch_over(&self, name: &str) {
        if let Some(pager) = self.table().pagers.get_mut(name) {
            pager.launch_over = true;
            pager.say_launch_over();
            pager.report.state = PagerState::Ending;
        }
    }

    /// Takes a pager's statistics.
    pub fn update_stats(&self, update: PagerStats) -> Result<(), PagerError> {
        self.with(&update.consumer, |pager| pager.report.stats = Some(update.stats))
    }

    /// All consumers as they are now.
    pub fn reports(&self) -> Vec<ConsumerReport> {
        let table = self.table();
        let with_fds =
            |pager: &Pager| ConsumerReport { held_fds: pager.held.len(), ..pager.report.clone() };
        table.pagers.values().map(with_fds).collect()
    }

    /// A consumer as it is now.
    pub fn report(&self, name: &str) -> Result<ConsumerReport, PagerError> {
        self.with(name, |pager| pager.report.clone())
    }

    /// Where a consumer's pager takes requests.
    pub fn pager_socket(&self, name: &str) -> Result<PathBuf, PagerError> {
        self.with(name, |pager| pager.config.socket.clone())
    }

    /// A consumer's local memory was changed: its next pager starts with that.
    pub fn set_local_bytes(&self, name: &str, bytes: u64) -> Result<(), PagerError> {
        self.with(name, |pager| {
            pager.config.local_bytes = bytes;
            pager.report.local_bytes = bytes;
        })
    }

    /// How a consumer's memory is to be held in the pool.
    pub fn placement(&self, name: &str) -> Result<Placement, PagerError> {
        self.with(name, |pager| pager.config.placement.clone())
    }

    /// That was changed: the consumer's next pager starts with it.
    pub fn set_placement(&self, name: &str, placement: Placement) -> Result<(), PagerError> {
        self.with(name, |pager| pager.config.placement = placement)
    }

    /// Rings when a consumer comes or goes.
    pub fn news(&self) -> Arc<Bell> {
        Arc::clone(&self.0.news)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.table().pagers.len()
    }

    /// Waits until there are none, or time is up; `true` in the first case.
    pub fn wait_none(&self, patience: Duration) -> bool {
        let (table, _) = self
            .0
            .changed
            .wait_timeout_while(self.table(), patience, |table| !table.pagers.is_empty())
            .expect("no thread panics with the table");
        table.pagers.is_empty()
    }

    /// Ends all pagers, with the programs that they serve, and starts no others.
    pub fn stop(&self) {
        self.0.stop.set();
        self.signal_all(Signal::TERM);
        if !self.wait_none(STOP_GRACE) {
            self.signal_all(Signal::KILL);
            self.wait_none(STOP_GRACE);
        }
    }

    /// Enters a starting pager in the table, so that nobody else takes the name.
    fn reserve(
        &self,
        wish: &StartPager,
        monitor: Option<PathBuf>,
        launcher: Launcher,
    ) -> Result<PagerConfig, PagerError> {
        let space = SpaceId(random_u64());
        let mut table = self.table();
        if self.0.stop.is_set() {
            return Err(PagerError::Stopping);
        }
        table.check_free(&wish.name)?;
        table.started += 1;
        let socket = self.0.paths.pager_socket(table.started);
        let config = PagerConfig::new(wish.name.clone(), space.0, wish.local_bytes, socket);
        let seconds = |wished: Option<u64>, or| wished.map_or(or, Duration::from_secs);
        let config = PagerConfig {
            key: match wish.guest {
                None => [(); 3].map(|()| format!("{:016x}", random_u64())).concat(),
                Some(_) => String::new(),
            },
            site: self.0.donors.site().clone(),
            placement: wish.wanted.clone().or(self.0.copies),
            node: Some(self.0.paths.control_socket()),
            encrypt: wish.wanted.encrypt,
            tls_dir: self.0.donors.tls_dir().map(Path::to_owned),
            lease: seconds(wish.wanted.lease_s, config.lease),
            donor_patience: seconds(wish.wanted.donor_patience_s, config.donor_patience),
            cold: wish.wanted.cold,
            scrub_bytes_per_s: wish.wanted.scrub_bytes_per_s.unwrap_or(config.scrub_bytes_per_s),
            copying_bytes_per_s: wish
                .wanted
                .copying_bytes_per_s
                .unwrap_or(config.copying_bytes_per_s),
            failover: wish.wanted.failover_ms.map_or(config.failover, Duration::from_millis),
            guest: wish.guest.clone(),
            monitor,
            outlive: self.outlive(table.started),
            ..config
        };
        let report = ConsumerReport {
            name: wish.name.clone(),
            space,
            local_bytes: wish.local_bytes,
            ..ConsumerReport::default()
        };
        let pager = Pager {
            config: config.clone(),
            report,
            held: HeldFds::default(),
            target: None,
            launch_line: None,
            launch_over: false,
            launcher,
            last_word: LastWord::None,
        };
        table.pagers.insert(wish.name.clone(), pager);
        Ok(config)
    }

    fn outlive(&self, number: u32) -> Option<Outlive> {
        let socket = self.0.paths.pager_adoption(number);
        self.0.adopt_within.map(|patience| Outlive { socket, patience })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().expect("no thread panics with the table")
    }

    fn with<T>(&self, name: &str, use_it: impl FnOnce(&mut Pager) -> T) -> Result<T, PagerError> {
        let mut table = self.table();
        let pager =
            table.pagers.get_mut(name).ok_or_else(|| PagerError::Unknown(name.to_owned()))?;
        Ok(use_it(pager))
    }

    fn forget(&self, name: &str) -> Option<Pager> {
        let pager = self.table().pagers.remove(name);
        self.0.news.ring();
        self.0.changed.notify_all();
        pager
    }

    fn signal(&self, name: &str, signal: Signal) {
        if let Some(target) = self.table().pagers.get(name).and_then(|pager| pager.target.as_ref())
        {
            target.signal(signal);
        }
    }

    fn signal_all(&self, signal: Signal) {
        for target in self.table().pagers.values().filter_map(|pager| pager.target.as_ref()) {
            target.signal(signal);
        }
    }
}
