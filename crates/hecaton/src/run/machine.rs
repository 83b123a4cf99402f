//! `hecaton vm run`: a virtual machine on the pool's memory, started from its QEMU command line.
//!
//! As for a program, with these differences: the command line is changed so that the guest's RAM is
//! shared memory, only that memory is paged, and the node follows the machine through a monitor of
//! its own.

use super::{Consumer, Session, access, consumer, library};
use crate::cluster::ClusterArgs;
use crate::placement::{PoolArgs, RangeArgs};
use crate::terminal::failure::usage;
use hecaton_memory::Size;
use hecaton_node::NodePaths;
use hecaton_node::socket::message::StartVm;
use hecaton_uffd::guest_ram::SOCKET_VARIABLE;
use hecaton_vm::guest_ram::{self, Wish};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Arguments of `hecaton vm run`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The machine's name in the cluster [default: the program's, with this process's number]
    #[arg(long)]
    name: Option<String>,
    /// The guest's RAM; must agree with -m, if that is given too
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// The part of it that stays on this host [default: half of what is available]
    #[arg(long, value_name = "SIZE")]
    local: Option<Size>,
    /// Writes what was counted to this file, as JSON, when the machine has ended
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Memory that each of two donors lends, if there is no cluster and one is started for this
    /// machine [default: half of what is available]
    #[arg(long, value_name = "SIZE")]
    lend: Option<Size>,
    /// Prints the command line that QEMU would be started with, and starts nothing
    #[arg(long)]
    print: bool,
    #[command(flatten)]
    pool: PoolArgs,
    #[command(flatten)]
    ranges: RangeArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// QEMU and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Consumer { program, name, local_bytes } =
        consumer(&args.command[0], args.name.clone(), args.local, args.lend)?;
    program.check_library_loads()?;
    // Refuse a wrong command line before anything is started.
    let dir = args.cluster.dir();
    let arguments = edit(&args, &monitor(&dir, &name)?)?;
    if args.print {
        print_command(&args.command[0], &arguments);
        return Ok(ExitCode::SUCCESS);
    }
    let wanted = args.pool.check_with(&args.ranges)?;
    let library = library::find()?;
    access::check_guest()?;
    let mut session = Session::open(&args.cluster, args.lend, args.stats.as_deref())?;
    let dir = control_dir(session.client.status()?.control_socket);
    let monitor = monitor(&dir, &name)?;
    let arguments = edit(&args, &monitor)?;
    let wish = StartVm { name, local_bytes, wanted, monitor: Some(monitor), guest: None };
    let pager = session.client.start_vm(wish)?;
    let mut command = Command::new(&program.path);
    command
        .arg0(&args.command[0])
        .args(&arguments)
        .env(SOCKET_VARIABLE, &pager.socket)
        .env(library::PRELOAD_VARIABLE, library::preload_value(&library));
    session.run(command, None, &args.command, pager)
}

fn edit(args: &Args, monitor: &Path) -> anyhow::Result<Vec<OsString>> {
    let memory_bytes = args.memory.map(|Size(bytes)| bytes);
    match guest_ram::edit(&args.command[1..], Wish { memory_bytes, monitor }) {
        Ok(arguments) => Ok(arguments),
        Err(error) => usage!("this machine cannot run on pool memory: {error}"),
    }
}

fn monitor(dir: &Path, name: &str) -> anyhow::Result<PathBuf> {
    Ok(NodePaths::new(dir).monitor_socket(name)?)
}

/// The directory of the node whose control socket this is.
fn control_dir(socket: PathBuf) -> PathBuf {
    socket.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// As a shell would take it.
fn print_command(program: &OsString, arguments: &[OsString]) {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+,./:@%".contains(c);
    let quoted = |word: &OsString| {
        let word = word.to_string_lossy();
        match !word.is_empty() && word.chars().all(plain) {
            true => word.into_owned(),
            false => format!("'{}'", word.replace('\'', r"'\''")),
        }
    };
    let words: Vec<_> = std::iter::once(program).chain(arguments).map(quoted).collect();
    println!("{}", words.join(" "));
}
