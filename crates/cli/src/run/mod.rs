//! `hecaton run`: a program on the pool's memory.
//!
//! The node starts a pager; the program is started with `libhecaton.so` preloaded, which hands its
//! memory to that pager; signals are passed on and the program's exit status becomes this
//! command's. All that can be known to be wrong is said before anything is started.

mod access;
mod embedded;
mod exit;
pub(crate) mod library;
pub(crate) mod machine;
mod program;
mod signals;

use crate::cluster::ClusterArgs;
use crate::failure::usage;
use crate::lending;
use anyhow::Context as _;
use embedded::Embedded;
use hecaton_memory::Size;
use hecaton_node::client::NodeClient;
use hecaton_node::message::{PagerAddress, PagerEnd, StartPager};
use hecaton_node::report::{Host, check_name};
use hecaton_pager::MIN_LOCAL_BYTES;
use hecaton_uffd::handover::SOCKET_VARIABLE;
use program::Program;
use serde::Serialize;
use signals::Signals;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

/// Arguments of `hecaton run`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The program's memory that stays on this host [default: half of what is available]
    #[arg(long, value_name = "SIZE")]
    local: Option<Size>,
    /// Writes what was counted to this file, as JSON, when the program has ended
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// The consumer's name in the cluster [default: the program's, with this process's number]
    #[arg(long)]
    name: Option<String>,
    /// Memory that each of two donors lends, if there is no cluster and one is started for this
    /// program [default: half of what is available]
    #[arg(long, value_name = "SIZE")]
    lend: Option<Size>,
    /// Seconds that a donor may be away; a program that wants a page of one that is away for longer
    /// is ended
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    donor_patience: u64,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let host = Host::here().context("cannot read /proc")?;
    let local_bytes = local_bytes(args.local, &host)?;
    if let Some(lend) = args.lend {
        lending::check_least(lend)?;
    }
    let program = Program::find(&args.command[0])?;
    let name = consumer_name(args.name, &program)?;
    let library = library::find()?;
    access::check()?;
    let stats = args.stats.as_deref().map(StatsFile::create).transpose()?;

    let (mut client, mut embedded) = match args.cluster.local_node()? {
        Some(_) if args.lend.is_some() => {
            usage!("--lend is for a cluster that this command starts, but there is one already")
        }
        Some(client) => (client, None),
        None => {
            let embedded = Embedded::start(args.lend)?;
            (embedded.connect()?, Some(embedded))
        }
    };
    // From here on a signal does not end this process: it is the program's.
    let signals = Signals::hold()?;
    let pager = client.start_pager(StartPager {
        name,
        local_bytes,
        guest: None,
        donor_patience_s: Some(args.donor_patience),
    })?;
    let command = command(&args.command, &program, &pager, &library, &signals);
    let outcome = watch(command, client, &signals);
    if let (Some(embedded), Ok(Outcome { pager: None, .. })) = (&mut embedded, &outcome) {
        embedded.leave();
    }
    // A cluster of this command's own ends before this command does.
    drop(embedded);
    let outcome = outcome?;
    if let Some(stats) = stats {
        stats.write(&args.command, &outcome)?;
    }
    if let Some(error) = outcome.pager.as_ref().and_then(|end| end.error.as_ref()) {
        eprintln!("hecaton: the pager of `{}` failed: {error}", pager.name);
    }
    Ok(exit::code(outcome.status))
}

fn local_bytes(wanted: Option<Size>, host: &Host) -> anyhow::Result<u64> {
    let Some(Size(local)) = wanted else {
        return Ok((host.available_bytes / 2).max(MIN_LOCAL_BYTES));
    };
    check_local(local)?;
    if local > host.memory_bytes {
        usage!(
            "--local {} is more than the {} of this machine",
            Size(local),
            Size(host.memory_bytes)
        );
    }
    Ok(local)
}

/// Refuses local memory that a pager cannot work with.
pub(crate) fn check_local(local: u64) -> anyhow::Result<()> {
    if local < MIN_LOCAL_BYTES {
        usage!("--local {} is too little: give at least {}", Size(local), Size(MIN_LOCAL_BYTES));
    }
    Ok(())
}

fn consumer_name(wanted: Option<String>, program: &Program) -> anyhow::Result<String> {
    if let Some(name) = wanted {
        if let Err(error) = check_name(&name) {
            usage!("--name: {error}");
        }
        return Ok(name);
    }
    let base = program.path.file_name().unwrap_or_default().to_string_lossy();
    let base = base.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' });
    let base: String = base.take(40).collect();
    let base = base.trim_matches('-');
    let base = if base.is_empty() { "program" } else { base };
    Ok(format!("{base}-{}", std::process::id()))
}

/// The program's command line and environment.
fn command(
    words: &[OsString],
    program: &Program,
    pager: &PagerAddress,
    library: &Path,
    signals: &Signals,
) -> Command {
    let mut command = Command::new(&program.path);
    command
        .arg0(&words[0])
        .args(&words[1..])
        .env(SOCKET_VARIABLE, &pager.socket)
        .env(library::PRELOAD_VARIABLE, library::preload_value(library));
    signals.release_in(&mut command);
    command
}

/// How the program and its pager ended.
struct Outcome {
    status: ExitStatus,
    seconds: f64,
    /// `None` when a signal ended the wait for it, or the node is gone.
    pager: Option<PagerEnd>,
}

/// Runs the program, and then waits until the pager has given back what it held.
fn watch(
    mut command: Command,
    mut client: NodeClient,
    signals: &Signals,
) -> anyhow::Result<Outcome> {
    let launch_line = client.launch_line()?;
    let (told, pager_end) = mpsc::channel();
    thread::Builder::new().name("pager-end".into()).spawn(move || {
        let end = client.wait_end();
        // Nobody listens any more when a signal has ended the wait.
        let _ = told.send(end);
        signals::wake();
    })?;
    let started = Instant::now();
    let spawned = command.spawn();
    let mut child = spawned
        .with_context(|| format!("cannot start {}", Path::new(command.get_program()).display()))?;
    let mut ended = None;
    let status = wait_program(&mut child, signals, &pager_end, &mut ended)?;
    let seconds = started.elapsed().as_secs_f64();
    if launch_line.over().is_ok() && ended.is_none() {
        wait_pager(signals, &pager_end, &mut ended);
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

type PagerResult = Result<PagerEnd, hecaton_node::client::ClientError>;

/// Passes signals on until the program ends. A program whose pager failed is killed: its next
/// fault would wait for ever.
fn wait_program(
    child: &mut Child,
    signals: &Signals,
    pager_end: &Receiver<PagerResult>,
    ended: &mut Option<PagerResult>,
) -> anyhow::Result<ExitStatus> {
    loop {
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
) {
    loop {
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

/// The file that `--stats` names, opened before the program runs so that a wrong name costs
/// nothing.
struct StatsFile {
    path: PathBuf,
    file: File,
}

/// What is written to it.
#[derive(Serialize)]
struct StatsReport<'a> {
    command: Vec<String>,
    /// As a shell shows it: 128 and the signal's number for a program that a signal ended.
    exit_status: u8,
    seconds: f64,
    /// What the pager counted.
    pager: Option<&'a hecaton_pager::Stats>,
}

impl StatsFile {
    fn create(path: &Path) -> anyhow::Result<StatsFile> {
        match File::create(path) {
            Ok(file) => Ok(StatsFile { path: path.to_owned(), file }),
            Err(error) => usage!("--stats: cannot write {}: {error}", path.display()),
        }
    }

    fn write(mut self, command: &[OsString], outcome: &Outcome) -> anyhow::Result<()> {
        let report = StatsReport {
            command: command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            exit_status: exit::status(outcome.status),
            seconds: outcome.seconds,
            pager: outcome.pager.as_ref().and_then(|end| end.stats.as_ref()),
        };
        let mut text = serde_json::to_vec_pretty(&report)?;
        text.push(b'\n');
        self.file.write_all(&text).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// How long an embedded cluster may take to start or to end.
const CLUSTER_PATIENCE: Duration = Duration::from_secs(30);
