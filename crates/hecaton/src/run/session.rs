//! A command on the pool from its start to its end, and that of all that serves it: the pager, and
//! the cluster where it is one of this command's own.

use super::bare::Bare;
use super::embedded::Embedded;
use super::exit;
use super::family::{left_behind, orphans::Orphans};
use super::signals::{self, Signals};
use super::stats_file::StatsFile;
use crate::cluster::ClusterArgs;
use crate::terminal::failure::{CannotRun, usage};
use hecaton_memory::Size;
use hecaton_node::socket::client::{ClientError, NodeClient};
use hecaton_node::socket::launcher::Launched;
use hecaton_node::socket::message::{PagerAddress, PagerEnd};
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

/// Processes that outlive the program for less are its own affair.
const LEFT_PATIENCE: Duration = Duration::from_secs(1);

/// Everything that a command needs before a pager can be started for it.
pub(super) struct Session {
    /// The node that starts the pager.
    pub(super) client: NodeClient,
    /// `None` where there was a cluster.
    pub(super) embedded: Option<Embedded>,
    pub(super) signals: Signals,
    stats: Option<StatsFile>,
}

impl Session {
    /// Finds the node of this host, or starts a cluster whose donors lend `lend` each. From then on
    /// a signal does not end this process: it is the command's.
    pub(super) fn open(
        cluster: &ClusterArgs,
        lend: Option<Size>,
        stats: Option<&Path>,
    ) -> anyhow::Result<Session> {
        // Opened before anything runs, so that a wrong name costs nothing.
        let stats = stats.map(StatsFile::create).transpose()?;
        let (client, embedded) = match cluster.local_node()? {
            Some(_) if lend.is_some() => {
                usage!("--lend is for a cluster that this command starts, but there is one already")
            }
            Some(client) => (client, None),
            None => {
                let embedded = Embedded::start(lend)?;
                (embedded.connect()?, Some(embedded))
            }
        };
        Ok(Session { client, embedded, signals: Signals::hold()?, stats })
    }

    /// Runs the command to its end, and waits until its pager, which the node started before, has
    /// given back what it held. Puts the library into a `bare` program. `words` is the command as
    /// the user typed it.
    pub(super) fn run(
        self,
        mut command: Command,
        bare: Option<&Bare>,
        words: &[OsString],
        pager: PagerAddress,
    ) -> anyhow::Result<ExitCode> {
        let Session { client, mut embedded, signals, stats } = self;
        match bare {
            // `Bare::enter` restores the mask when the program begins.
            Some(bare) => bare.prepare(&mut command),
            None => signals.release_in(&mut command),
        }
        let name = pager.name.clone();
        let cluster = embedded.as_ref().map(Embedded::id);
        let outcome = watch(command, bare, client, pager, &signals, cluster);
        if let (Some(embedded), Ok(Outcome { pager: None, .. })) = (&mut embedded, &outcome) {
            embedded.leave();
        }
        // A cluster of this command's own ends before this command does.
        drop(embedded);
        let outcome = outcome?;
        if let Some(stats) = stats {
            stats.write(words, &outcome)?;
        }
        if let Some(error) = outcome.pager.as_ref().and_then(|end| end.error.as_ref()) {
            eprintln!("hecaton: the pager of `{name}` failed: {error}");
        }
        let counted = outcome.pager.as_ref().and_then(|end| end.stats.as_ref());
        let lines = counted.map(|stats| [stats.outside.describe(), stats.describe_missing()]);
        for line in lines.into_iter().flatten().flatten() {
            eprintln!("hecaton: {line}");
        }
        if outcome.status.core_dumped() {
            eprintln!(
                "hecaton: the core file of `{name}` lacks the memory that was paged; debuggers may \
                 show zeros there"
            );
        }
        Ok(exit::code(outcome.status))
    }
}

/// How the program and its pager ended.
pub(super) struct Outcome {
    pub(super) status: ExitStatus,
    pub(super) seconds: f64,
    /// `None` when a signal ended the wait for it, or the node is gone.
    pub(super) pager: Option<PagerEnd>,
}

/// Runs the program, and then waits until the pager has given back what it held.
fn watch(
    mut command: Command,
    bare: Option<&Bare>,
    client: NodeClient,
    pager: PagerAddress,
    signals: &Signals,
    cluster: Option<u32>,
) -> anyhow::Result<Outcome> {
    let (name, socket) = (pager.name.clone(), pager.socket.clone());
    let launched = Arc::new(Launched::new(&client, pager)?);
    let (told, pager_end) = mpsc::channel();
    thread::Builder::new().name("pager-end".into()).spawn({
        let launched = Arc::clone(&launched);
        move || {
            let end = launched.wait_end(client);
            // Nobody listens any more when a signal has ended the wait.
            let _ = told.send(end);
            signals::wake();
        }
    })?;
    let started = Instant::now();
    let mut child = command.spawn().map_err(|error| {
        let program = Path::new(command.get_program()).display();
        CannotRun::because(&error, format!("cannot start {program}: {error}"))
    })?;
    if let Some(bare) = bare {
        bare.enter(&mut child)?;
    }
    let mut ended = None;
    let orphans = Orphans::except(cluster.into_iter().chain([child.id()]));
    let status = wait_program(&mut child, signals, &pager_end, &mut ended, &orphans)?;
    let seconds = started.elapsed().as_secs_f64();
    launched.over();
    if ended.is_none() {
        let (waiting, over) = mpsc::channel::<()>();
        thread::Builder::new().name("left-behind".into()).spawn(move || {
            if over.recv_timeout(LEFT_PATIENCE) == Err(RecvTimeoutError::Timeout)
                && let Some(line) = left_behind::describe(&name, &socket)
            {
                eprintln!("hecaton: {line}");
            }
        })?;
        wait_pager(signals, &pager_end, &mut ended, &orphans);
        drop(waiting);
    }
    let pager = match ended {
        Some(Ok(end)) => Some(end),
        Some(Err(error)) => {
            eprintln!("hecaton: nothing is known of the pager: {error}");
            None
        }
        None => None,
    };
    Ok(Outcome { status, seconds, pager })
}

type PagerResult = Result<PagerEnd, ClientError>;

/// Passes signals on until the program ends. A program whose pager failed is killed: its next
/// fault would wait for ever.
fn wait_program(
    child: &mut Child,
    signals: &Signals,
    pager_end: &Receiver<PagerResult>,
    ended: &mut Option<PagerResult>,
    orphans: &Orphans,
) -> anyhow::Result<ExitStatus> {
    loop {
        orphans.reap();
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if ended.is_none() {
            *ended = pager_end.try_recv().ok();
            if matches!(ended, Some(Ok(PagerEnd { error: Some(_), .. }))) {
                child.kill()?;
            }
        }
        signals.wait_and_forward(child)?;
    }
}

/// Waits for the pager, which lives as long as anything that the program left behind; a signal
/// that would end a program ends the wait.
fn wait_pager(
    signals: &Signals,
    pager_end: &Receiver<PagerResult>,
    ended: &mut Option<PagerResult>,
    orphans: &Orphans,
) {
    loop {
        orphans.reap();
        match pager_end.try_recv() {
            Ok(end) => {
                *ended = Some(end);
                return;
            }
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => {}
        }
        if signals.wait_for_end() {
            return;
        }
    }
}
