//! `hecaton vm create --restart`: a harvest VM that is there whenever there is room for it.
//!
//! The machine is a child of this process: the same command without `--restart`, which waits to be
//! admitted and becomes QEMU, so that to the agent it is a machine like any other. Why it has ended
//! the agent knows, also one that was started in the meantime: the machine's exit status says
//! nothing of it, for QEMU ends in good order when it is evicted. When the machine may come back is
//! the broker's matter.

use super::create::{Args, NODE_INTERVAL, NODE_PATIENCE};
use crate::run::{exit, signals::Signals};
use anyhow::{Context as _, bail};
use hecaton_node::agent::AgentReport;
use std::env;
use std::ffi::{OsStr, OsString};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::thread;
use std::time::Instant;

/// The argument that the machine's own command does not have.
const RESTART: &str = "--restart";

pub(super) fn run(args: &Args, name: &str) -> anyhow::Result<ExitCode> {
    let program = env::current_exe().context("this program cannot be found")?;
    // Under one name all the time: by that the agent keeps it away for a while.
    let own_name = args.name.is_none().then_some(name);
    let arguments = without_restart(env::args_os().skip(1), own_name);
    let signals = Signals::hold()?;
    loop {
        let mut command = Command::new(&program);
        command.args(&arguments);
        signals.release_in(&mut command);
        let mut machine =
            command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let pid = machine.id();
        let (status, is_told_to_end) = wait(&mut machine, &signals)?;
        if is_told_to_end || !gave_way(args, name, pid, &signals)? {
            return Ok(exit::code(status));
        }
        eprintln!("hecaton: {name} has ended for others, and is started again once there is room");
    }
}

/// Waits for the machine's end; also whether this command was told to end meanwhile, as the machine
/// was then.
fn wait(machine: &mut Child, signals: &Signals) -> anyhow::Result<(ExitStatus, bool)> {
    let mut is_told_to_end = false;
    loop {
        if let Some(status) = machine.try_wait()? {
            return Ok((status, is_told_to_end));
        }
        is_told_to_end |= signals.wait_and_forward(machine)?;
    }
}

/// Asks the agent, or the next one, why the machine has ended.
fn gave_way(args: &Args, name: &str, pid: u32, signals: &Signals) -> anyhow::Result<bool> {
    let mut lost = Instant::now();
    loop {
        let report = args.cluster.need_local_node().and_then(|mut node| Ok(node.status()?));
        let error = match report.map(|report| report.agent) {
            Ok(Some(agent)) => match why(&agent, name, pid) {
                Some(gave_way) => return Ok(gave_way),
                // The agent still lists the machine: other processes of a container may run on.
                None => {
                    lost = Instant::now();
                    None
                }
            },
            // It has not looked yet.
            Ok(None) => None,
            Err(error) => Some(error),
        };
        if signals.has_ending() {
            return Ok(false);
        }
        if lost.elapsed() > NODE_PATIENCE {
            let what = format!("why {name} has ended cannot be asked, and it is not started again");
            match error {
                Some(error) => return Err(error.context(what)),
                None => bail!("{what}: the node's agent does not look at its host"),
            }
        }
        thread::sleep(NODE_INTERVAL);
    }
}

/// Whether it was for others; none as long as the agent has not seen that it has ended.
fn why(agent: &AgentReport, name: &str, pid: u32) -> Option<bool> {
    if agent.machines.iter().any(|machine| machine.name == name && machine.pid == pid) {
        return None;
    }
    Some(agent.gave_way.iter().any(|one| one.name == name && one.pid == pid))
}

/// The command line of the machine itself. Nothing before the argument can be another one's value:
/// clap has read it as a flag.
fn without_restart(
    arguments: impl Iterator<Item = OsString>,
    own_name: Option<&str>,
) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.collect();
    if let Some(at) = arguments.iter().position(|argument| argument == RESTART) {
        let name = own_name.map(|name| [OsStr::new("--name").to_owned(), name.into()]);
        arguments.splice(at..=at, name.into_iter().flatten());
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_itself_is_not_started_again_and_keeps_its_name() {
        let edited = |line: &str, name| {
            let words = without_restart(line.split(' ').map(OsString::from), name);
            words.join(OsStr::new(" ")).into_string().unwrap()
        };
        let line = "vm create --restart --harvest -- qemu --restart";
        assert_eq!(edited(line, None), "vm create --harvest -- qemu --restart");
        assert_eq!(edited(line, Some("vm-7")), "vm create --name vm-7 --harvest -- qemu --restart");
    }
}
