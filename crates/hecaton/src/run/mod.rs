//! `hecaton run`: a program on the pool's memory.
//!
//! The node starts a pager. The program starts with `libhecaton.so` preloaded, which hands its
//! memory to that pager. Into a program without glibc, this command itself puts the library (see
//! [`bare`]). The command passes signals on, and exits with the program's status. It refuses
//! everything that can be known to be wrong before it starts anything.

pub(crate) mod access;
mod bare;
mod embedded;
pub(crate) mod exit;
mod family;
pub(crate) mod library;
pub(crate) mod machine;
mod program;
mod room;
mod session;
pub(crate) mod signals;
mod stats_file;
pub(crate) mod swap;

use crate::cluster::ClusterArgs;
use crate::daemons::lending;
use crate::placement::PoolArgs;
use crate::terminal::failure::usage;
use anyhow::Context as _;
use bare::Bare;
use hecaton_memory::Size;
use hecaton_node::cluster::report::{Host, check_name};
use hecaton_node::socket::message::StartPager;
use hecaton_pager::MIN_LOCAL_BYTES;
use hecaton_uffd::handover::{
    KEY_VARIABLE, LARGEST_MAPPING_VARIABLE, LAUNCHER_VARIABLE, LOCAL_VARIABLE, SOCKET_VARIABLE,
};
use program::{Linker, Program};
use session::Session;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// How a program's memory gets to the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Via {
    /// Hecaton serves its page faults, through userfaultfd
    Faults,
    /// The kernel swaps to a volume: takes root, and covers whatever a program has
    Swap,
}

/// Where a program is that is to be executed and nothing loaded into it.
pub(crate) fn find_program(name: &OsStr) -> anyhow::Result<PathBuf> {
    Ok(program::Program::find_any(name)?.path)
}

/// Arguments of `hecaton run`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The program's memory that stays on this host [default: half of what is available]
    #[arg(long, value_name = "SIZE")]
    local: Option<Size>,
    /// How its other memory gets to the pool
    #[arg(long, value_enum, default_value_t = Via::Faults)]
    via: Via,
    /// With `--via swap`, the swap that there is for it [default: the memory of this machine]
    #[arg(long, value_name = "SIZE")]
    swap: Option<Size>,
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
    #[command(flatten)]
    pool: PoolArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.via {
        Via::Faults if args.swap.is_some() => usage!("--swap is for --via swap"),
        Via::Faults => run_on_faults(args),
        Via::Swap => swap::run(args),
    }
}

fn run_on_faults(args: Args) -> anyhow::Result<ExitCode> {
    let Consumer { program, name, local_bytes } =
        consumer(&args.command[0], args.name, args.local, args.lend)?;
    let wanted = args.pool.check()?;
    let library = library::find()?;
    access::check()?;
    let mut session = Session::open(&args.cluster, args.lend, args.stats.as_deref())?;
    let largest = room::largest_mapping(&args.cluster, &mut session.client, wanted.copies)?;
    let pager =
        session.client.start_pager(StartPager { name, local_bytes, guest: None, wanted })?;
    let mut command = Command::new(&program.path);
    command
        .arg0(&args.command[0])
        .args(&args.command[1..])
        .env(SOCKET_VARIABLE, &pager.socket)
        .env(KEY_VARIABLE, &pager.key)
        .env(LARGEST_MAPPING_VARIABLE, largest.to_string())
        .env(LOCAL_VARIABLE, local_bytes.to_string())
        .env(library::SANITIZER_VARIABLE, library::sanitizer_options());
    if program.linker != Linker::Musl {
        // musl's dynamic linker ends a program whose library wants glibc.
        command.env(library::PRELOAD_VARIABLE, library::preload_value(&library));
    }
    let bare = match program.linker {
        Linker::Glibc => {
            command.env(LAUNCHER_VARIABLE, std::process::id().to_string());
            None
        }
        Linker::None | Linker::Musl => {
            Some(Bare::new(&library, &pager.socket, session.signals.before())?)
        }
    };
    session.run(command, bare.as_ref(), &args.command, pager)
}

/// A program to start, its name, and the bytes of its memory that may be local.
struct Consumer {
    program: Program,
    name: String,
    local_bytes: u64,
}

/// Checks what a program and a machine have in common.
fn consumer(
    program: &OsStr,
    name: Option<String>,
    local: Option<Size>,
    lend: Option<Size>,
) -> anyhow::Result<Consumer> {
    let host = Host::here().context("cannot read /proc")?;
    let local_bytes = local_bytes(local, &host)?;
    if let Some(lend) = lend {
        lending::check_least(lend)?;
    }
    let program = Program::find(program)?;
    let name = consumer_name(name, &program)?;
    Ok(Consumer { program, name, local_bytes })
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
