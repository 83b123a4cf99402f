//! `hecaton vm create --container`: any program, in a memory cgroup that the node's agent has made.
//!
//! The agent has moved this process into the group by the time it answers; what it becomes, and all
//! that this starts, is in the group as well.

use super::create::{Args, wait_for_memory};
use anyhow::Context as _;
use hecaton_memory::numa;
use hecaton_node::socket::message::{Admitted, CreateVm};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Where the program may listen to be told of its memory beforehand, as the manager inside a guest
/// is.
const PORT: &str = "HECATON_PORT";

pub(super) fn run(args: &Args, wish: &CreateVm, program: &Path) -> anyhow::Result<ExitCode> {
    let admitted = wait_for_memory(args.cluster.need_local_node()?, wish)?;
    let Admitted { memory, guest_port, .. } = admitted;
    if let Some(node) = memory.parts.first().and_then(|part| part.host_node) {
        numa::bind_thread(node)
            .with_context(|| format!("cannot bind the container's memory to NUMA node {node}"))?;
    }
    let mut command = Command::new(program);
    command.arg0(&args.command[0]).args(&args.command[1..]);
    if let Some(port) = guest_port {
        command.env(PORT, port);
    }
    let error = command.exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}
