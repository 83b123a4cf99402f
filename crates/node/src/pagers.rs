//! The pagers: one process per consumer, started on request, started again when it dies.
//!
//! A pager that is killed takes nothing along: the node holds duplicates of its descriptors
//! ([`crate::held`]), so the consumer's faults wait, and the next pager takes them over and
//! answers them. Hence the rule of this file: while descriptors are held, a pager that was killed
//! is started again at once, as often as [`CrashLimit`] allows. One that ends by itself means it: its consumer has ended.
//!
//! A pager's standard input is a socket. Down it go the configuration and what the pager before it
//! had handed over, and then nothing: when the node closes that direction, the launcher will start
//! no further program, and the pager ends as soon as nothing uses it. Up it come descriptors to be
//! held. All of them are taken in before the next pager is started: a descriptor that the dead one
//! has sent is as good as held.

use crate::channel::{self, MAX_FDS_PER_LINE, Receiver};
use crate::child::{ChildCommand, End, Group};
use crate::donor_directory::DonorDirectory;
use crate::held::HeldFds;
use crate::message::{PagerAddress, PagerEnd, PagerStats, StartPager};
use crate::node_dir::NodePaths;
use crate::report::check_name;
use crate::restart::CrashLimit;
use crate::stop::{Bell, Stop};
use hecaton_memory::{SpaceId, random_u64};
use hecaton_pager::{Donor, PagerConfig, PagerEvent, PagerStart, Stats};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// Most consumers of one node.
pub const MAX_PAGERS: usize = 256;

/// How long a pager may take until it listens.
const START_PATIENCE: Duration = Duration::from_secs(20);

/// How long a pager that was told to end may take before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// The pause after a pager that could not even be started, so that those attempts are not over
/// before whatever keeps the executable from being run has passed.
const START_PAUSE: Duration = Duration::from_millis(400);

/// How long donors keep a space whose pager is silent: long enough for a pager to be started again
/// on a host that is short of everything, short enough that a lost host's pages do not stay.
const LEASE: Duration = Duration::from_secs(60);

/// How long a donor may be away before a consumer is ended that wants a page of it, if the launcher
/// does not say. When the donor comes back after the lease, it may have given the pages up.
const DONOR_PATIENCE: Duration = LEASE;

/// What a pager is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagerState {
    /// Its process is being started, or started again.
    Starting,
    /// It serves faults.
    Serving,
    /// Its launcher is done: it ends when the last process that uses it does.
    Ending,
}

/// A consumer, as the node reports it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ConsumerReport {
    /// The consumer's name.
    pub name: String,
    /// The space that holds its pages.
    pub space: SpaceId,
    /// What its pager is doing.
    pub state: PagerState,
    /// The pager's process, while there is one.
    pub pid: Option<u32>,
    /// How often the pager was started again by the node.
    pub restarts: u64,
    /// Most bytes of the consumer's memory that stay on this host.
    pub local_bytes: u64,
    /// Descriptors that the node holds for the pager.
    pub held_fds: usize,
    /// What the pager counted, as of its last line; none before the first.
    pub stats: Option<Stats>,
}

/// Why a pager is not started, or not to be found.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// The name cannot be one.
    #[error(transparent)]
    Name(#[from] crate::report::NameError),
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
        /// What is known.
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

/// All pagers of a node.
#[derive(Clone, Debug)]
pub struct Pagers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    command: ChildCommand,
    paths: NodePaths,
    donors: Arc<DonorDirectory>,
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
    group: Option<Group>,
    /// The pager's standard input.
    launch_line: Option<UnixStream>,
    launch_over: bool,
    /// The pager's own word on why it ends.
    failure: Option<String>,
}

impl Pager {
    /// Tells the process that no further program comes; the other direction stays open.
    fn hang_up(&self) {
        if let Some(line) = &self.launch_line {
            // Fails when the process has ended, which is as well.
            let _ = line.shutdown(Shutdown::Write);
        }
    }
}

impl Pagers {
    /// No pagers yet.
    pub fn new(command: ChildCommand, paths: NodePaths, donors: Arc<DonorDirectory>) -> Pagers {
        Pagers(Arc::new(Shared {
            command,
            paths,
            donors,
            table: Mutex::default(),
            changed: Condvar::new(),
            stop: Stop::default(),
            news: Arc::default(),
        }))
    }

    /// Starts a pager and waits until it listens. `on_end` is called if and only if this succeeds.
    pub fn start(&self, wish: &StartPager, on_end: OnEnd) -> Result<PagerAddress, PagerError> {
        check_name(&wish.name)?;
        let config = self.reserve(wish)?;
        let (decided, outcome) = mpsc::sync_channel(1);
        let supervisor = {
            let (pagers, name) = (self.clone(), wish.name.clone());
            move || pagers.supervise(&name, &decided, on_end)
        };
        let spawned = thread::Builder::new().name("pager-supervisor".into()).spawn(supervisor);
        if let Err(error) = spawned {
            self.forget(&wish.name);
            return Err(error.into());
        }
        let fail = |reason: String| PagerError::Start { consumer: wish.name.clone(), reason };
        match outcome.recv_timeout(START_PATIENCE) {
            Ok(Ok(pid)) => Ok(PagerAddress { name: wish.name.clone(), socket: config.socket, pid }),
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
            pager.hang_up();
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
    pub fn pager_socket(&self, name: &str) -> Result<std::path::PathBuf, PagerError> {
        self.with(name, |pager| pager.config.socket.clone())
    }

    /// A consumer's local memory was changed: its next pager starts with that.
    pub fn set_local_bytes(&self, name: &str, bytes: u64) -> Result<(), PagerError> {
        self.with(name, |pager| {
            pager.config.local_bytes = bytes;
            pager.report.local_bytes = bytes;
        })
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
    fn reserve(&self, wish: &StartPager) -> Result<PagerConfig, PagerError> {
        let space = SpaceId(random_u64());
        let mut table = self.table();
        if self.0.stop.is_set() {
            return Err(PagerError::Stopping);
        }
        if table.pagers.contains_key(&wish.name) {
            return Err(PagerError::NameTaken(wish.name.clone()));
        }
        if table.pagers.len() >= MAX_PAGERS {
            return Err(PagerError::TooMany);
        }
        table.started += 1;
        let config = PagerConfig {
            consumer: wish.name.clone(),
            space: space.0,
            local_bytes: wish.local_bytes,
            socket: self.0.paths.pager_socket(table.started),
            donors: Vec::new(),
            node: Some(self.0.paths.control_socket()),
            lease: LEASE,
            guest: wish.guest.clone(),
            donor_patience: wish.donor_patience_s.map_or(DONOR_PATIENCE, Duration::from_secs),
        };
        let report = ConsumerReport {
            name: wish.name.clone(),
            space,
            state: PagerState::Starting,
            pid: None,
            restarts: 0,
            local_bytes: wish.local_bytes,
            held_fds: 0,
            stats: None,
        };
        let pager = Pager {
            config: config.clone(),
            report,
            held: HeldFds::default(),
            group: None,
            launch_line: None,
            launch_over: false,
            failure: None,
        };
        table.pagers.insert(wish.name.clone(), pager);
        Ok(config)
    }

    /// Runs a pager until it ends in peace, or has nothing to come back for.
    fn supervise(&self, name: &str, decided: &SyncSender<Result<u32, String>>, on_end: OnEnd) {
        let mut limit = CrashLimit::default();
        let mut served = false;
        let mut wanted = true;
        let error = loop {
            let listening = |pid| {
                wanted = served || decided.send(Ok(pid)).is_ok();
                served = true;
                wanted
            };
            let (reason, pause) = match self.run_once(name, listening) {
                Ok(End::Exited(0)) => break None,
                Ok(end) if !end.is_crash() => {
                    let own_word = self.with(name, |pager| pager.failure.take()).ok().flatten();
                    break Some(own_word.unwrap_or_else(|| end.to_string()));
                }
                Ok(end) => (end.to_string(), Duration::ZERO),
                Err(error) => (error.to_string(), START_PAUSE),
            };
            let holds = self.with(name, |pager| !pager.held.is_empty()).unwrap_or(false);
            if !holds || !wanted || self.0.stop.is_set() {
                break Some(reason);
            }
            if limit.is_exceeded_by_death(Instant::now()) {
                break Some(format!("{}; at last, {reason}", CrashLimit::REASON));
            }
            tracing::warn!(consumer = name, reason, "pager died; starting another");
            let _ = self.with(name, |pager| {
                pager.report.restarts += 1;
                pager.report.state = PagerState::Starting;
            });
            if self.0.stop.wait(pause) {
                break Some("the node is stopping".to_owned());
            }
        };
        let Some(pager) = self.forget(name) else { return };
        if !served {
            let reason = error.unwrap_or_else(|| "it ended before it listened".to_owned());
            // The launcher may have given up waiting.
            let _ = decided.send(Err(reason));
            return;
        }
        on_end(PagerEnd { name: name.to_owned(), error, stats: pager.report.stats.clone() });
        // Only now: the launcher has been told, and kills what still uses the descriptors.
        drop(pager);
    }

    /// Runs one process to its end. `listening` is told its pid once it listens, and says whether
    /// anybody still wants it.
    fn run_once(&self, name: &str, listening: impl FnOnce(u32) -> bool) -> io::Result<End> {
        let (ours, theirs) = UnixStream::pair()?;
        let stdin = Stdio::from(OwnedFd::from(theirs));
        let mut running = self.0.command.spawn("pager", stdin, Stdio::piped())?;
        let pid = running.pid();
        let group = running.group();
        let output = running.child.stdout.take().expect("its output is a pipe");
        let _ = self.with(name, |pager| {
            pager.group = Some(group);
            pager.report.pid = Some(pid);
            pager.config.donors = self.donors_now();
        });
        // One that died at once takes no start line; how it died, its end says.
        let started =
            self.send_start(name, &ours).and_then(|()| wait_ready(BufReader::new(output)));
        let launch_line = ours.try_clone()?;
        // Before the launcher is told: it may be done with launching at once.
        let _ = self.with(name, |pager| {
            pager.launch_line = Some(launch_line);
            if pager.launch_over {
                pager.hang_up();
                pager.report.state = PagerState::Ending;
            } else if started.is_ok() {
                pager.report.state = PagerState::Serving;
            }
        });
        self.0.news.ring();
        let wanted = started.is_ok() && listening(pid);
        if !wanted || self.0.stop.is_set() {
            group.signal(Signal::TERM);
        }
        self.hold_what_comes(name, ours);
        let end = running.wait();
        let _ = self.with(name, |pager| {
            pager.group = None;
            pager.launch_line = None;
            pager.report.pid = None;
        });
        end
    }

    /// Tells a pager what it is to be, and gives it what the one before it had.
    fn send_start(&self, name: &str, stream: &UnixStream) -> io::Result<()> {
        let start = self.with(name, |pager| {
            let held = pager
                .held
                .iter()
                .map(|(label, fd)| Ok((label.to_owned(), fd.try_clone_to_owned()?)));
            Ok::<_, io::Error>((pager.config.clone(), held.collect::<io::Result<Vec<_>>>()?))
        });
        let (config, held) = start.map_err(io::Error::other)??;
        // The pager reads them as they come, so that they need not fit in the socket.
        channel::send(stream, &PagerStart { config, held: held.len() }, &[])?;
        for held in held.chunks(MAX_FDS_PER_LINE) {
            let labels: Vec<_> = held.iter().map(|(label, _)| label).collect();
            let fds: Vec<_> = held.iter().map(|(_, fd)| fd.as_fd()).collect();
            channel::send(stream, &labels, &fds)?;
        }
        Ok(())
    }

    /// Takes in the descriptors that a pager sends, until it has ended.
    fn hold_what_comes(&self, name: &str, stream: UnixStream) {
        let Ok(writing) = stream.try_clone() else { return };
        let mut receiver = Receiver::new(stream);
        let mut take_in = || -> io::Result<bool> {
            let Some(event) = receiver.receive()? else { return Ok(false) };
            let held = match event {
                PagerEvent::HoldFds(labels) => {
                    let fds = receiver.take_fds(labels.len())?;
                    self.with(name, |pager| pager.held.hold(labels, fds))
                }
                PagerEvent::Failed(reason) => self.with(name, |pager| {
                    pager.failure = Some(reason);
                    Ok(())
                }),
                PagerEvent::DropFds(labels) => self.with(name, |pager| {
                    pager.held.drop_labels(&labels);
                    Ok(())
                }),
            };
            held.map_err(io::Error::other)?.map_err(io::Error::other)?;
            Ok(true)
        };
        loop {
            match take_in() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::error!(consumer = name, %error, "cannot hold what the pager gives");
                    // The pager learns of it when it sends the next.
                    let _ = writing.shutdown(Shutdown::Read);
                    return;
                }
            }
        }
    }

    fn donors_now(&self) -> Vec<Donor> {
        let donors = self.0.donors.all().into_iter();
        donors.map(|donor| Donor { name: donor.name, address: donor.address }).collect()
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
        if let Some(group) = self.table().pagers.get(name).and_then(|pager| pager.group) {
            group.signal(signal);
        }
    }

    fn signal_all(&self, signal: Signal) {
        for group in self.table().pagers.values().filter_map(|pager| pager.group) {
            group.signal(signal);
        }
    }
}

/// Reads the line by which a pager says that it listens.
fn wait_ready(mut output: BufReader<std::process::ChildStdout>) -> io::Result<()> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    match line.trim_end() {
        "ready" => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::adopt_orphans;
    use rustix::process::{Pid, kill_process};
    use std::sync::mpsc::Receiver;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn pagers(script: &str) -> Pagers {
        adopt_orphans().expect("adopted");
        let command =
            ChildCommand { program: "/bin/sh".into(), args: vec!["-c".into(), script.into()] };
        Pagers::new(command, NodePaths::new("/nowhere"), Arc::new(DonorDirectory::new(vec![])))
    }

    /// A pager that ends in peace at the end of its input.
    const GOOD: &str = "read config; echo ready; exec cat >/dev/null";

    fn start(pagers: &Pagers, name: &str) -> Result<Receiver<PagerEnd>, PagerError> {
        let (told, end) = mpsc::channel();
        let on_end = Box::new(move |end| told.send(end).expect("the test listens"));
        let wish = StartPager {
            name: name.to_owned(),
            local_bytes: 1 << 24,
            guest: None,
            donor_patience_s: None,
        };
        pagers.start(&wish, on_end).map(|_| end)
    }

    fn kill(pagers: &Pagers) {
        let pid = pagers.reports()[0].pid.expect("a process");
        kill_process(Pid::from_raw(pid as i32).expect("not zero"), Signal::KILL).expect("killed");
    }

    fn wait_until(pagers: &Pagers, what: impl Fn(&ConsumerReport) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !what(&pagers.reports()[0]) {
            assert!(Instant::now() < deadline, "{:?}", pagers.reports());
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn ends_in_peace_when_its_launcher_is_done() {
        let pagers = pagers(GOOD);
        let end = start(&pagers, "a").expect("started");
        assert_eq!(pagers.reports()[0].state, PagerState::Serving);
        pagers.launch_over("a");
        let end = end.recv_timeout(PATIENCE).expect("ended");
        assert_eq!((end.name.as_str(), end.error), ("a", None));
        assert!(pagers.wait_none(PATIENCE));
    }

    #[test]
    fn without_held_descriptors_a_death_is_an_end() {
        let pagers = pagers(GOOD);
        let end = start(&pagers, "a").expect("started");
        kill(&pagers);
        let end = end.recv_timeout(PATIENCE).expect("ended");
        assert_eq!(end.error.as_deref(), Some("it was killed by signal 9"));
    }

    /// Has the node hold a descriptor, as if the pager had sent it.
    fn hold(pagers: &Pagers, label: &str) {
        let fd = tempfile::tempfile().expect("a file").into();
        let held = pagers.with("a", |pager| pager.held.hold(vec![label.into()], vec![fd]));
        held.expect("it is there").expect("there is room");
    }

    #[test]
    fn with_held_descriptors_it_is_started_again_and_given_them() {
        let seen = tempfile::NamedTempFile::new().expect("a file");
        let script = format!(
            r#"read config
            case "$config" in *'"held":2'*) read labels; echo "$labels" >{} ;; esac
            echo ready
            exec cat >/dev/null"#,
            seen.path().display()
        );
        let pagers = pagers(&script);
        let end = start(&pagers, "a").expect("started");
        hold(&pagers, "state");
        hold(&pagers, "uffd-1");
        kill(&pagers);
        wait_until(&pagers, |report| report.restarts == 1 && report.state == PagerState::Serving);
        let seen = std::fs::read_to_string(seen.path()).expect("written");
        assert_eq!(seen.trim(), r#"["state","uffd-1"]"#);
        pagers.launch_over("a");
        assert_eq!(end.recv_timeout(PATIENCE).expect("ended").error, None);
    }

    #[test]
    fn what_a_pager_sent_is_held_before_the_next_is_started() {
        let pagers = pagers(GOOD);
        let end = start(&pagers, "a").expect("started");
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let file = tempfile::tempfile().expect("a file");
        let send =
            |event: PagerEvent, fds: &[_]| channel::send(&theirs, &event, fds).expect("sent");
        let labels = |labels: &[&str]| labels.iter().map(|&label| label.to_owned()).collect();
        send(PagerEvent::HoldFds(labels(&["a", "b"])), &[file.as_fd(), file.as_fd()]);
        send(PagerEvent::DropFds(labels(&["a"])), &[]);
        drop(theirs);
        pagers.hold_what_comes("a", ours);
        assert_eq!(pagers.reports()[0].held_fds, 1);
        pagers.launch_over("a");
        assert_eq!(end.recv_timeout(PATIENCE).expect("ended").error, None);
    }

    #[test]
    fn one_that_ends_by_itself_is_not_started_again() {
        let pagers = pagers("read config; echo ready; read nothing; exit 3");
        let end = start(&pagers, "a").expect("started");
        hold(&pagers, "state");
        pagers.launch_over("a");
        let end = end.recv_timeout(PATIENCE).expect("ended");
        assert_eq!(end.error.as_deref(), Some("it ended with status 3"));
    }

    #[test]
    fn one_that_keeps_dying_is_given_up_with_the_reason() {
        let pagers = pagers(r#"read config; echo ready; sleep 0.05; exit 101"#);
        let end = start(&pagers, "a").expect("started");
        hold(&pagers, "state");
        let error = end.recv_timeout(PATIENCE).expect("ended").error.expect("a reason");
        assert!(error.contains("20 times") && error.contains("status 101"), "{error}");
    }

    #[test]
    fn a_launcher_that_is_done_while_it_restarts_is_not_forgotten() {
        let pagers = pagers("read config; sleep 0.2; echo ready; exec cat >/dev/null");
        let end = start(&pagers, "a").expect("started");
        hold(&pagers, "state");
        kill(&pagers);
        wait_until(&pagers, |report| report.restarts == 1);
        pagers.launch_over("a");
        assert_eq!(end.recv_timeout(PATIENCE).expect("ended").error, None);
    }

    #[test]
    fn one_that_does_not_start_is_refused_with_its_reason() {
        let pagers = pagers("exit 4");
        let error = start(&pagers, "a").expect_err("refused").to_string();
        assert!(error.contains("it ended with status 4"), "{error}");
        assert_eq!(pagers.count(), 0);
    }

    #[test]
    fn a_name_is_given_once() {
        let pagers = pagers(GOOD);
        let end = start(&pagers, "a").expect("started");
        assert!(matches!(start(&pagers, "a"), Err(PagerError::NameTaken(_))));
        assert!(matches!(start(&pagers, "../a"), Err(PagerError::Name(_))));
        pagers.launch_over("a");
        end.recv_timeout(PATIENCE).expect("ended");
        assert!(pagers.wait_none(PATIENCE));
        let end = start(&pagers, "a").expect("free again");
        pagers.stop();
        end.recv_timeout(PATIENCE).expect("ended");
        assert!(matches!(start(&pagers, "b"), Err(PagerError::Stopping)));
    }
}
