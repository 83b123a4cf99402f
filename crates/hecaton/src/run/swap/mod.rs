//! `hecaton run --via swap`: a memory cgroup with a limit, and swap on a volume.
//!
//! This way does not look into the program, and loads nothing into it. The kernel swaps its memory,
//! of whatever kind, once the group is at its limit. The keeper ([`keeper`]) sets up the swap.

pub(crate) mod keeper;

use super::program::Program;
use super::session::Session;
use super::{Args, consumer_name, exit, local_bytes};
use crate::cgroup::entering;
use crate::daemons::lending;
use crate::terminal::failure::usage;
use anyhow::{Context as _, bail};
use hecaton_memory::{PAGE_SIZE, Size};
use hecaton_node::NodePaths;
use hecaton_node::cluster::report::Host;
use hecaton_node::socket::message::CreateVolume;
use keeper::{Wish, Word};
use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};

pub(super) fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.stats.is_some() {
        usage!(
            "--stats: with --via swap nothing is counted; `hecaton volume status` shows the volume"
        );
    }
    if !rustix::process::geteuid().is_root() {
        bail!("--via swap takes root: it makes a memory cgroup, a block device and swap");
    }
    let host = Host::here().context("cannot read /proc")?;
    let local_bytes = local_bytes(args.local, &host)?;
    if let Some(lend) = args.lend {
        lending::check_least(lend)?;
    }
    let program = Program::find_any(&args.command[0])?;
    let name = consumer_name(args.name, &program)?;
    let Size(swap_bytes) = args.swap.unwrap_or(Size(host.memory_bytes));
    let placement = args.pool.check_for_volume()?;
    let session = Session::open(&args.cluster, args.lend, None)?;
    let volume = CreateVolume {
        name: name.clone(),
        size_bytes: swap_bytes / PAGE_SIZE as u64 * PAGE_SIZE as u64,
        copies: placement.copies,
        donors: placement.donors,
        donor_patience_s: placement.donor_patience_s,
        scrub_bytes_per_s: placement.scrub_bytes_per_s,
        copying_bytes_per_s: placement.copying_bytes_per_s,
        failover_ms: placement.failover_ms,
        for_swap: true,
        encrypt: placement.encrypt,
        ..CreateVolume::default()
    };
    let wish = Wish {
        node: session.client.socket().to_owned(),
        volume,
        file: file(),
        cgroup: format!("hecaton-{name}"),
        local_bytes,
    };
    let mut keeper = Keeper::start(&wish)?;
    // Not a page of the program is accounted elsewhere: it is in the group before it is itself.
    let mut command = entering(&keeper.cgroup);
    command.arg(&program.path).args(&args.command[1..]);
    let Session { mut embedded, signals, .. } = session;
    signals.release_in(&mut command);
    let mut child = command.spawn().context("cannot start /bin/sh")?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        signals.wait_and_forward(&child)?;
    };
    keeper.release();
    while keeper.is_there()? {
        // It waits for what the program left behind; a signal that would end a program ends the
        // wait.
        if signals.wait_for_end() {
            if let Some(embedded) = &mut embedded {
                embedded.leave();
            }
            break;
        }
    }
    // A cluster of this command's own ends before this command does.
    drop(embedded);
    Ok(exit::code(status))
}

/// Where the volume may be a file: a name that no other command has.
fn file() -> PathBuf {
    let mut name = NodePaths::default_dir().into_os_string();
    name.push(format!("-swap-{}", std::process::id()));
    name.into()
}

/// The keeper, and the pipe that tells it when it is not needed any more.
struct Keeper {
    process: Child,
    cgroup: PathBuf,
}

impl Keeper {
    fn start(wish: &Wish) -> anyhow::Result<Keeper> {
        let program = env::current_exe().context("cannot tell where the hecaton command is")?;
        let mut process = Command::new(program)
            .arg("swap-keeper")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // The terminal's signals are the program's affair.
            .process_group(0)
            .spawn()
            .context("cannot start what keeps the swap")?;
        let input = process.stdin.as_mut().expect("its input is a pipe");
        writeln!(input, "{}", serde_json::to_string(wish)?)
            .context("cannot tell what is wanted")?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("its output is a pipe"))
            .read_line(&mut line)?;
        match serde_json::from_str(&line) {
            Ok(Word::Ready(cgroup)) => Ok(Keeper { process, cgroup }),
            Ok(Word::Failed(reason)) => {
                process.wait()?;
                bail!("there is no swap for the program: {reason}")
            }
            Err(_) => bail!("what keeps the swap has ended: {}", process.wait()?),
        }
    }

    fn release(&mut self) {
        drop(self.process.stdin.take());
    }

    fn is_there(&mut self) -> anyhow::Result<bool> {
        match self.process.try_wait()? {
            None => Ok(true),
            Some(status) if status.success() => Ok(false),
            Some(status) => bail!(
                "what keeps the swap has ended ({status}) and may have left some behind: see \
                 /proc/swaps, `losetup -a`, `hecaton volume list` and {}",
                self.cgroup.display()
            ),
        }
    }
}
