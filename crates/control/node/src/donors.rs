//! The donor processes: started, listened to, started again.
//!
//! A donor's memory must outlive the donor: a crash of the process that serves pages is no reason
//! to lose them. So the node binds the donor's port, keeps duplicates of the descriptors that the
//! donor sends up (its memory files), and gives all of them to the next process. Borrowers
//! meanwhile see a connection that closes and, at the same port, one that waits in the queue of a
//! listener that was never closed.
//!
//! Node and donor talk over the socket that is the donor's standard input: [`DonorStart`] goes
//! down, and [`DonorOrder`]s; [`DonorEvent`]s come up. The node ends a donor by an order. When the
//! socket ends without one the node was killed: the donor goes on, as [`DonorStart::outlive`] says,
//! and answers the node that adopts it ([`crate::children::adopt`]) with the [`DonorStart`] that
//! another process in its place would get. From then on donors of both kinds are alike.

mod locking;
mod message;
pub(crate) mod parts;

pub use message::{DonorEvent, DonorMemory, DonorOrder, DonorPark, DonorStart, LISTENER};

use crate::channel::{self, Receiver};
use crate::children::adopt::Adopted;
use crate::children::child::{ChildCommand, Conversation, Running, Target};
use crate::children::held::HeldFds;
use crate::children::restart::Backoff;
use crate::stop::Stop;
use hecaton_donor::Snapshot;
use hecaton_memory::Size;
use hecaton_pager::adoption::Outlive;
use locking::Locking;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a donor may take to close its books before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(3);

/// A donor that the node is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DonorSpec {
    /// Its name; one of its kind in the cluster.
    pub name: String,
    /// Most bytes that it lends.
    pub lend_bytes: u64,
    /// Kind of memory that it lends.
    pub memory: DonorMemory,
    /// Bytes that its host is to have available, if it sees to that.
    pub keep_free_bytes: Option<u64>,
    /// Where it parks what it is to give back and nobody can take, if it does.
    pub park: Option<DonorPark>,
    /// The directory of its node's certificate, if it is to speak TLS.
    pub tls_dir: Option<PathBuf>,
    /// Where it serves; port 0 takes a free one.
    pub listen: SocketAddr,
}

/// State of a donor's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DonorState {
    /// Its process is being started, or started again.
    #[default]
    Starting,
    /// It serves requests.
    Serving,
    /// Its process ends because the node does.
    Stopping,
}

/// A donor, as the node reports it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct DonorReport {
    /// The donor's name.
    pub name: String,
    /// State of its process.
    pub state: DonorState,
    /// Where it serves the page protocol.
    pub address: Option<SocketAddr>,
    /// Its process, while there is one.
    pub pid: Option<u32>,
    /// How often it was started again.
    pub restarts: u64,
    /// Most bytes that it lends.
    pub lend_bytes: u64,
    /// Kind of memory that it lends.
    pub memory: DonorMemory,
    /// Why the process before this one ended, if there was one.
    pub last_error: Option<String>,
    /// Its managers' order to give back what it has lent. That its node is not let in is no order.
    #[serde(default)]
    pub is_told_to_drain: bool,
    /// Limit of its managers in bytes, if below `lend_bytes`. Its agent's limit may be lower still.
    #[serde(default)]
    pub managers_limit_bytes: Option<u64>,
    /// Its last statistics; `None` before the first.
    pub stats: Option<Snapshot>,
}

/// A donor under supervision. Dropping it does not end it; [`Donor::stop`] does.
#[derive(Debug)]
pub struct Donor {
    shared: Arc<Shared>,
    supervisor: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    command: ChildCommand,
    spec: DonorSpec,
    listener: TcpListener,
    outlive: Option<Outlive>,
    /// A node before this one has started it.
    is_adopted: bool,
    stop: Stop,
    /// The process is not ended with this node, and not waited for.
    left_alone: Stop,
    status: Mutex<Status>,
    changed: Condvar,
}

#[derive(Debug)]
struct Status {
    report: DonorReport,
    held: HeldFds,
    process: Option<Process>,
    has_served: bool,
    draining: bool,
    locking: Locking,
    /// Limit of its host's agent in bytes; `None` without an agent.
    host_limit_bytes: Option<u64>,
}

/// Means to stop the donor's process: first its stream, then a signal.
#[derive(Debug)]
struct Process {
    stream: UnixStream,
    target: Target,
}

/// Why a donor that was left is not this node's.
#[derive(Debug, thiserror::Error)]
pub enum OrphanError {
    /// It is not as this node's donor is to be.
    #[error(
        "the node before this one has left it {left}, and it is to be {wanted}: start the node as \
         that one was started, or kill process {pid} and lose what it has lent"
    )]
    Different {
        /// The donor's settings.
        left: String,
        /// The settings that this node wants.
        wanted: String,
        /// Its process.
        pid: u32,
    },
    /// Its descriptors did not come, or not all.
    #[error("what the node before this one has left of it cannot be taken over")]
    Io(#[from] io::Error),
}

impl Donor {
    /// Binds the donor's port and starts its process; [`Donor::wait_serving`] tells how that went.
    pub fn start(
        command: &ChildCommand,
        spec: DonorSpec,
        outlive: Option<Outlive>,
    ) -> io::Result<Donor> {
        let listener = TcpListener::bind(spec.listen)?;
        let report = DonorReport {
            name: spec.name.clone(),
            address: Some(listener.local_addr()?),
            lend_bytes: spec.lend_bytes,
            memory: spec.memory,
            ..DonorReport::default()
        };
        let status = Status {
            report,
            held: HeldFds::default(),
            process: None,
            has_served: false,
            draining: false,
            locking: Locking::No,
            host_limit_bytes: None,
        };
        Donor::supervised(command, spec, outlive, listener, status, None)
    }

    /// Goes on with a donor that a node before this one has left.
    pub(crate) fn adopt(
        command: &ChildCommand,
        spec: DonorSpec,
        outlive: Outlive,
        mut orphan: Adopted<DonorStart>,
    ) -> Result<Donor, OrphanError> {
        let mut fds = orphan.child.receiver.take_fds(orphan.word.labels.len())?;
        let (running, start) = orphan.settled()?;
        let at = start.labels.iter().position(|label| label == LISTENER);
        let at = at.ok_or_else(|| io::Error::other("its listening socket did not come"))?;
        let listener = TcpListener::from(fds.remove(at));
        let address = listener.local_addr()?;
        if let Some((left, wanted)) = difference(&spec, &start, address) {
            return Err(OrphanError::Different { left, wanted, pid: running.process.pid() });
        }
        let locking = Locking::of(start.locked);
        let mut labels = start.labels;
        labels.remove(at);
        let mut held = HeldFds::default();
        held.hold(labels, fds).map_err(io::Error::other)?;
        let report = DonorReport {
            name: spec.name.clone(),
            state: DonorState::Serving,
            address: Some(address),
            lend_bytes: spec.lend_bytes,
            memory: spec.memory,
            restarts: start.restarts,
            is_told_to_drain: start.draining,
            managers_limit_bytes: start.limit_bytes,
            ..DonorReport::default()
        };
        let status = Status {
            report,
            held,
            process: None,
            has_served: true,
            draining: start.draining,
            locking,
            host_limit_bytes: None,
        };
        Ok(Donor::supervised(command, spec, Some(outlive), listener, status, Some(running))?)
    }

    fn supervised(
        command: &ChildCommand,
        spec: DonorSpec,
        outlive: Option<Outlive>,
        listener: TcpListener,
        mut status: Status,
        running: Option<Conversation>,
    ) -> io::Result<Donor> {
        if let Some(running) = &running {
            // Before anybody can ask for the process.
            status.enter(running)?;
        }
        let shared = Arc::new(Shared {
            command: command.clone(),
            spec,
            listener,
            outlive,
            is_adopted: running.is_some(),
            stop: Stop::default(),
            left_alone: Stop::default(),
            status: Mutex::new(status),
            changed: Condvar::new(),
        });
        let supervisor = thread::Builder::new().name("donor-supervisor".into()).spawn({
            let shared = Arc::clone(&shared);
            move || supervise(&shared, running)
        })?;
        Ok(Donor { shared, supervisor })
    }

    /// Waits until the donor serves, or its process has ended, or time is up.
    pub fn wait_serving(&self, patience: Duration) -> Result<(), String> {
        let status = self.shared.status.lock().expect("no thread panics with the status");
        let undecided =
            |status: &mut Status| !status.has_served && status.report.last_error.is_none();
        let (status, timeout) = self
            .shared
            .changed
            .wait_timeout_while(status, patience, undecided)
            .expect("no thread panics with the status");
        match &status.report.last_error {
            _ if status.has_served => Ok(()),
            Some(error) => Err(error.clone()),
            None => {
                debug_assert!(timeout.timed_out());
                Err(format!("it does not serve after {} s", patience.as_secs()))
            }
        }
    }

    /// The donor's name.
    pub fn name(&self) -> &str {
        &self.shared.spec.name
    }

    /// The donor as it is now.
    pub fn report(&self) -> DonorReport {
        self.shared.lock().report.clone()
    }

    /// Waits until it has said that it lends, or drains, as it is to, or time is up.
    pub(crate) fn wait_obeyed(&self, patience: Duration) {
        let lags = |status: &mut Status| {
            let said = status.report.stats.as_ref().map(|stats| stats.draining);
            said != Some(status.draining) && status.process.is_some()
        };
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), patience, lags);
        drop(waited.expect("no thread panics with the status"));
    }

    /// Whether the node before this one has left it, with all that it had lent.
    pub(crate) fn is_adopted(&self) -> bool {
        self.shared.is_adopted
    }

    /// Drains the donor if it is told to or its node withholds it; otherwise it goes on lending.
    pub fn set_draining(&self, is_told: bool, is_withheld: bool) {
        let mut status = self.shared.lock();
        let draining = is_told || is_withheld;
        status.report.is_told_to_drain = is_told;
        if std::mem::replace(&mut status.draining, draining) != draining {
            status.order(DonorOrder::Drain(draining));
        }
    }

    /// Has it keep what it lends from being swapped out, from now on.
    pub(crate) fn lock_memory(&self) -> LockAsked {
        let mut status = self.shared.lock();
        if status.locking.ask() {
            status.order(DonorOrder::Lock);
        }
        LockAsked(Arc::clone(&self.shared))
    }

    /// Has it lend no more than so many bytes and give back what it has lent above that, or lend
    /// again all that it has.
    pub fn set_limit(&self, limit_bytes: Option<u64>) {
        let change = |status: &mut Status| status.report.managers_limit_bytes = limit_bytes;
        self.shared.lock().change_limits(change);
    }

    /// The same for the agent of its host: the lesser of both limits counts.
    pub(crate) fn set_host_limit(&self, limit_bytes: u64) {
        self.shared.lock().change_limits(|status| status.host_limit_bytes = Some(limit_bytes));
    }

    /// Caps the donor until its host's agent sets a limit: at zero, or at an adopted donor's last
    /// limit. That may have been the agent's limit or the managers', who repeat theirs.
    pub(crate) fn await_host_limit(&self) {
        let most = match self.shared.is_adopted {
            true => self.shared.spec.lend_bytes,
            false => 0,
        };
        self.shared.lock().change_limits(|status| {
            let told = status.report.managers_limit_bytes.take();
            status.host_limit_bytes = Some(told.unwrap_or(most));
        });
    }

    /// Bytes that its host's agent lets it lend; all of them without an agent.
    pub(crate) fn host_limit(&self) -> u64 {
        let limit_bytes = self.shared.lock().host_limit_bytes;
        limit_bytes.unwrap_or(self.shared.spec.lend_bytes)
    }

    /// Whether its memory was set aside for huge pages, which nobody else can have.
    pub(crate) fn has_huge_pages(&self) -> bool {
        self.shared.spec.memory.huge_pages
    }

    /// Tells the process to end; [`Donor::join`] waits for it.
    pub fn stop(&self) {
        self.shared.stop.set();
        let mut status = self.shared.lock();
        status.report.state = DonorState::Stopping;
        status.order(DonorOrder::Stop);
    }

    /// Leaves a donor that was adopted to the node after this one; [`Donor::join`] then does not
    /// wait for it. For a node that does not come to be.
    pub(crate) fn leave_if_adopted(&self) {
        if !self.shared.is_adopted {
            return;
        }
        self.shared.left_alone.set();
        self.shared.stop.set();
        if let Some(process) = &self.shared.lock().process {
            let _ = process.stream.shutdown(Shutdown::Both);
        }
    }

    /// Waits for the end of a donor that was told to [`stop`](Donor::stop).
    pub fn join(self) {
        let deadline = Instant::now() + STOP_GRACE;
        let status = self.shared.lock();
        let (status, _) = self
            .shared
            .changed
            .wait_timeout_while(
                status,
                deadline.saturating_duration_since(Instant::now()),
                |status| status.process.is_some(),
            )
            .expect("no thread panics with the status");
        if let Some(process) = &status.process {
            process.target.signal(Signal::KILL);
        }
        drop(status);
        // A supervisor that panicked has said so on stderr already.
        let _ = self.supervisor.join();
    }
}

/// A donor that was told to lock its memory.
pub(crate) struct LockAsked(Arc<Shared>);

impl LockAsked {
    /// Waits until it has. Else tells why not, in words.
    pub(crate) fn wait(self, patience: Duration) -> Result<(), String> {
        let LockAsked(donor) = self;
        let is_asked = |status: &mut Status| status.locking == Locking::Asked;
        let waited = donor.changed.wait_timeout_while(donor.lock(), patience, is_asked);
        let (status, _) = waited.expect("no thread panics with the status");
        status.locking.failure(&donor.spec.name, patience).map_or(Ok(()), Err)
    }
}

impl Status {
    /// The lower of both limits, in bytes.
    fn least_limit(&self) -> Option<u64> {
        self.report.managers_limit_bytes.into_iter().chain(self.host_limit_bytes).min()
    }

    fn change_limits(&mut self, change: impl FnOnce(&mut Status)) {
        let before = self.least_limit();
        change(self);
        let limit = self.least_limit();
        if limit != before {
            self.order(DonorOrder::Limit(limit));
        }
    }

    fn order(&self, order: DonorOrder) {
        if let Some(process) = &self.process
            && let Err(error) = channel::send(&process.stream, &order, &[])
        {
            // The next one is told as it starts.
            tracing::debug!(%error, "donor process took no order");
        }
    }

    fn enter(&mut self, running: &Conversation) -> io::Result<()> {
        let Conversation { process, stream, .. } = running;
        self.report.pid = Some(process.pid());
        self.process = Some(Process { stream: stream.try_clone()?, target: process.target() });
        Ok(())
    }
}

/// Settings of an orphaned donor, and the wanted ones, in words, if they differ. Pure.
fn difference(
    spec: &DonorSpec,
    left: &DonorStart,
    address: SocketAddr,
) -> Option<(String, String)> {
    let what = |start: &DonorStart, address: SocketAddr| {
        let DonorStart { lend_bytes, memory, keep_free_bytes, park, tls_dir, .. } = start;
        let node = memory.numa_node.map_or("all".to_owned(), |node| node.to_string());
        let pages = if memory.huge_pages { "huge pages" } else { "pages" };
        let kept = keep_free_bytes.map(|kept| format!(" that keeps {} free", Size(kept)));
        let parked = park.as_ref().map(|park| {
            let most = park.limit_bytes.map(|most| format!("up to {} ", Size(most)));
            format!(" and parking {}in {}", most.unwrap_or_default(), park.dir.display())
        });
        let tls = tls_dir.as_ref().map(|dir| format!(" with the certificate in {}", dir.display()));
        let [kept, parked, tls] = [kept, parked, tls].map(Option::unwrap_or_default);
        let lent = Size(*lend_bytes);
        format!("lending {lent} of {pages} of NUMA node {node}{kept}{parked} at {address}{tls}")
    };
    let same_place = spec.listen.ip() == address.ip()
        && (spec.listen.port() == 0 || spec.listen.port() == address.port());
    let wanted = DonorStart {
        lend_bytes: spec.lend_bytes,
        memory: spec.memory,
        keep_free_bytes: spec.keep_free_bytes,
        park: spec.park.clone(),
        tls_dir: spec.tls_dir.clone(),
        ..left.clone()
    };
    (!same_place || wanted != *left).then(|| (what(left, address), what(&wanted, spec.listen)))
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Status> {
        self.status.lock().expect("no thread panics with the status")
    }

    fn update(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

/// Runs the donor's processes, one after the other, until the node stops; the first of them may run
/// already. One that never served is not started again: what keeps it from serving does not go
/// away, and the node does not start.
fn supervise(shared: &Shared, mut running: Option<Conversation>) {
    let mut backoff = Backoff::default();
    let donor = &shared.spec.name;
    loop {
        let born = Instant::now();
        let process = running.take().map_or_else(|| start(shared), Ok);
        let end = process.and_then(|process| follow(shared, process));
        let end = end.unwrap_or_else(|error| format!("cannot run it: {error}"));
        if shared.stop.is_set() {
            return;
        }
        let has_served = shared.lock().has_served;
        shared.update(|status| {
            status.report.last_error = Some(end.clone());
            status.report.state = DonorState::Starting;
        });
        if !has_served {
            return;
        }
        tracing::warn!(donor, reason = end, "donor process ended; starting it again");
        shared.update(|status| status.report.restarts += 1);
        if shared.stop.wait(backoff.after_death(born.elapsed())) {
            return;
        }
    }
}

/// Starts a process, and tells it what it is to be.
fn start(shared: &Shared) -> io::Result<Conversation> {
    let (ours, theirs) = UnixStream::pair()?;
    let receiver = Receiver::new(ours.try_clone()?);
    let process =
        shared.command.spawn("donor", Stdio::from(OwnedFd::from(theirs)), Stdio::null())?;
    let running = Conversation { process: Running::Started(process), stream: ours, receiver };
    let mut status = shared.lock();
    status.enter(&running)?;
    let locked = Some(status.locking.begins());
    let mut labels = vec![LISTENER.to_owned()];
    let mut fds = vec![shared.listener.as_fd()];
    for (label, fd) in status.held.iter() {
        labels.push(label.to_owned());
        fds.push(fd);
    }
    let start = DonorStart {
        name: shared.spec.name.clone(),
        lend_bytes: shared.spec.lend_bytes,
        memory: shared.spec.memory,
        keep_free_bytes: shared.spec.keep_free_bytes,
        park: shared.spec.park.clone(),
        tls_dir: shared.spec.tls_dir.clone(),
        draining: status.draining,
        locked,
        limit_bytes: status.least_limit(),
        restarts: status.report.restarts,
        outlive: shared.outlive.clone(),
        labels,
    };
    if let Err(error) = channel::send(&running.stream, &start, &fds) {
        // It died at once; how, its exit status says.
        tracing::debug!(%error, "donor process took no start line");
    }
    drop(status);
    shared.changed.notify_all();
    Ok(running)
}

/// Follows one process to its end, and says why it ended.
fn follow(shared: &Shared, running: Conversation) -> io::Result<String> {
    let Conversation { process, receiver, .. } = running;
    // A stop that came before the process was known has told nobody.
    if shared.stop.is_set() {
        shared.lock().order(DonorOrder::Stop);
    }
    let last_word = listen(shared, receiver);
    if shared.left_alone.is_set() {
        shared.update(|status| status.process = None);
        return Ok("it is left alone".to_owned());
    }
    if last_word.is_err() {
        process.target().signal(Signal::KILL);
    }
    let end = process.wait().map(|end| end.to_string());
    shared.update(|status| {
        status.report.pid = None;
        status.process = None;
    });
    let end = end?;
    Ok(last_word?.unwrap_or(end))
}

/// Listens to the donor until it ends, which closes its stream. Returns the donor's own reason, if
/// it sent one.
fn listen(shared: &Shared, mut receiver: Receiver) -> io::Result<Option<String>> {
    let mut failure = None;
    while let Some(event) = receiver.receive()? {
        match event {
            DonorEvent::HoldFds(labels) => {
                let fds = receiver.take_fds(labels.len())?;
                let held = shared.lock().held.hold(labels, fds);
                held.map_err(io::Error::other)?;
            }
            DonorEvent::Serving => shared.update(|status| {
                status.has_served = true;
                if status.report.state == DonorState::Starting {
                    status.report.state = DonorState::Serving;
                }
            }),
            DonorEvent::Stats(stats) => shared.update(|status| status.report.stats = Some(*stats)),
            DonorEvent::Locked(refused) => shared.update(|status| {
                status.locking = refused.map_or(Locking::Done, Locking::Refused);
            }),
            DonorEvent::Failed(reason) => failure = Some(reason),
        }
    }
    Ok(failure)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::children::child::adopt_orphans;
    use hecaton_testkit::{patience, wait_until_seen};
    use rustix::process::{Pid, kill_process};
    use std::net::Ipv4Addr;

    /// A donor that says and does what `script` does; its standard input is a socket both ways.
    fn donor(script: &str) -> Donor {
        adopt_orphans().expect("adopted");
        let command =
            ChildCommand { program: "/bin/sh".into(), args: vec!["-c".into(), script.into()] };
        let spec = DonorSpec {
            name: "d".to_owned(),
            lend_bytes: 1 << 20,
            memory: DonorMemory::default(),
            keep_free_bytes: None,
            park: None,
            tls_dir: None,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
        };
        Donor::start(&command, spec, None).expect("bound")
    }

    const GOOD: &str = r#"
        read start
        echo '"serving"' >&0
        read stop"#;

    fn wait_until_reported(
        donor: &Donor,
        what: &str,
        is_so: impl Fn(&DonorReport) -> bool,
    ) -> DonorReport {
        wait_until_seen(what, || {
            let report = donor.report();
            if is_so(&report) { Ok(report) } else { Err(format!("{report:?}")) }
        })
    }

    #[test]
    fn serves_until_it_is_stopped() {
        let donor = donor(GOOD);
        donor.wait_serving(patience()).expect("serves");
        let report = donor.report();
        assert_eq!(report.state, DonorState::Serving);
        let pid = Pid::from_raw(report.pid.expect("a process") as i32).expect("not zero");
        donor.stop();
        donor.join();
        assert!(kill_process(pid, Signal::KILL).is_err(), "it is gone");
    }

    #[test]
    fn what_its_host_s_agent_says_is_no_word_of_the_managers() {
        let donor = donor(GOOD);
        let limits = || {
            let status = donor.shared.lock();
            (status.report.managers_limit_bytes, status.least_limit())
        };
        donor.await_host_limit();
        assert_eq!(limits(), (None, Some(0)));
        donor.set_host_limit(70);
        donor.set_limit(Some(90));
        assert_eq!(limits(), (Some(90), Some(70)));
        donor.set_limit(Some(50));
        assert_eq!(limits(), (Some(50), Some(50)));
        donor.set_limit(None);
        assert_eq!(limits(), (None, Some(70)));
        donor.stop();
        donor.join();
    }

    #[test]
    fn is_started_again_at_the_same_address_when_killed() {
        let donor = donor(GOOD);
        donor.wait_serving(patience()).expect("serves");
        let before = donor.report();
        let pid = Pid::from_raw(before.pid.expect("a process") as i32).expect("not zero");
        kill_process(pid, Signal::KILL).expect("killed");
        let after = wait_until_reported(&donor, "the next process serves", |report| {
            report.restarts == 1 && report.state == DonorState::Serving
        });
        assert_eq!(after.address, before.address);
        assert_ne!(after.pid, before.pid);
        donor.stop();
        donor.join();
    }

    #[test]
    fn one_that_ignores_its_stop_is_killed() {
        let donor = donor(r#"echo '"serving"' >&0; while :; do sleep 1; done"#);
        donor.wait_serving(patience()).expect("serves");
        donor.stop();
        donor.join();
    }

    #[test]
    fn why_it_does_not_start_is_told() {
        let failing = donor(r#"echo '{"failed":"no memory left"}' >&0; exit 1"#);
        assert_eq!(failing.wait_serving(patience()), Err("no memory left".to_owned()));
        failing.stop();
        failing.join();
        let silent = donor("exit 3");
        assert_eq!(silent.wait_serving(patience()), Err("it ended with status 3".to_owned()));
        silent.stop();
        silent.join();
    }

    #[test]
    fn nonsense_ends_the_process_and_not_the_supervisor() {
        let donor = donor(r#"echo '"serving"' >&0; echo hello >&0; exec cat >/dev/null"#);
        let report = wait_until_reported(&donor, "two restarts", |report| report.restarts >= 2);
        let reason = report.last_error.expect("it is told");
        assert!(reason.contains("not a known message"), "{reason}");
        donor.stop();
        donor.join();
    }
}
