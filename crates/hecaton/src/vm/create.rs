//! `hecaton vm create`: a virtual machine, or a container, on this host's own memory, once the
//! node's agent has room for it.
//!
//! This process asks, and becomes QEMU when it is admitted: so the agent knows the machine by its
//! process from the moment it is promised memory, and nobody has to live beside it. Its exit
//! status, terminal and signals are QEMU's.

use super::{container, restart};
use crate::cluster::ClusterArgs;
use crate::run::find_program;
use crate::terminal::failure::usage;
use anyhow::{Context as _, bail};
use hecaton_broker::NewcomerKind;
use hecaton_memory::Size;
use hecaton_node::cluster::report::check_name;
use hecaton_node::socket::client::{ClientError, NodeClient};
use hecaton_node::socket::message::{Admitted, CreateVm};
use hecaton_vm::create::{self, BALLOON_DRIVER, GROWING_DRIVER, Memory, check_sizes};
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long another node is looked for when the one that was asked has been killed.
pub(super) const NODE_PATIENCE: Duration = Duration::from_secs(60);

/// How often.
pub(super) const NODE_INTERVAL: Duration = Duration::from_millis(250);

/// Arguments of `hecaton vm create`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// All of its memory is its own as long as it runs; others give back what it needs
    #[arg(long, group = "kind", required = true)]
    regular: bool,
    /// As a regular one, and low-priority itself: harvest VMs have more time to give back what it
    /// needs
    #[arg(long, group = "kind", required = true)]
    spot: bool,
    /// It has its minimum, and up to its maximum what nobody else needs. Its kernel needs
    /// memhp_default_state=online_movable on its command line
    #[arg(long, group = "kind", required = true)]
    harvest: bool,
    /// No machine: COMMAND is any program, which with all that it starts is in a memory cgroup
    /// whose limit is --memory, or is moved between --min and --max
    #[arg(long)]
    container: bool,
    /// The memory of a regular or spot machine
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["harvest", "min", "max"])]
    memory: Option<Size>,
    /// The memory that a harvest VM has as long as it runs
    #[arg(long, value_name = "SIZE", requires = "harvest")]
    min: Option<Size>,
    /// The most memory that a harvest VM has
    #[arg(long, value_name = "SIZE", requires = "harvest")]
    max: Option<Size>,
    /// The cores that a regular or spot machine has as long as it runs; without it, it takes no
    /// part in the division of the host's cores
    #[arg(long, value_name = "NUMBER")]
    cores: Option<u32>,
    /// The cores that a harvest VM has as long as it runs, beside those that nobody else uses at
    /// the moment; without it, it takes no part in the division of the host's cores
    #[arg(long, value_name = "NUMBER")]
    min_cores: Option<u32>,
    /// For a guest, or a QEMU, without virtio-mem: the harvest VM begins with its maximum, once
    /// there is room for that, and gives back by virtio-balloon and free-page reporting. A reboot
    /// ends it
    #[arg(long)]
    balloon: bool,
    /// Stays, and starts a harvest VM that was evicted again once there is room; one that ends by
    /// itself, or by a signal, is not started again
    #[arg(long, requires = "harvest")]
    restart: bool,
    /// The host's NUMA node that its memory is to be on [default: one that has room]
    #[arg(long, value_name = "NODE")]
    numa: Option<u32>,
    /// The machine's name on this host [default: vm- and this process's number]
    #[arg(long)]
    pub(super) name: Option<String>,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
    /// QEMU and its arguments, without those about its memory; with --container any program and its
    /// own
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(super) command: Vec<OsString>,
}

impl Args {
    fn wish(&self) -> anyhow::Result<CreateVm> {
        if self.balloon && self.container {
            usage!(
                "--balloon is how a machine's guest gives memory back, and a container gives by its limit; leave it out"
            );
        }
        if self.balloon && !self.harvest {
            usage!(
                "--balloon is how a harvest VM gives memory back, and others give none; leave it out, or give --harvest"
            );
        }
        let (min, max) = match (self.harvest, self.memory, self.min, self.max) {
            (false, Some(memory), ..) => (memory, memory),
            (true, _, Some(min), Some(max)) => (min, max),
            (false, ..) => usage!("give --memory SIZE: how much memory the machine has"),
            (true, ..) => usage!("give --min SIZE and --max SIZE: a harvest VM needs both"),
        };
        if let Err(error) = check_sizes(min.0, max.0) {
            usage!("{error}");
        }
        let name = self.name.clone().unwrap_or_else(|| format!("vm-{}", std::process::id()));
        if let Err(error) = check_name(&name) {
            usage!("--name: {error}");
        }
        let kind = match (self.harvest, self.spot) {
            (true, _) => NewcomerKind::Harvest,
            (false, true) => NewcomerKind::Spot,
            (false, false) => NewcomerKind::Regular,
        };
        let (bytes, max_bytes) = (min.0, max.0);
        let (numa_node, cores) = (self.numa, self.wanted_cores()?);
        let (balloon, container, domain) = (self.balloon, self.container, None);
        Ok(CreateVm { name, kind, bytes, max_bytes, numa_node, cores, balloon, container, domain })
    }

    /// None is 0: it takes no part in their division.
    fn wanted_cores(&self) -> anyhow::Result<u32> {
        let (option, wanted) = match (self.harvest, self.cores, self.min_cores) {
            (true, Some(cores), _) => usage!(
                "--cores {cores} is for machines that always have the same; give --min-cores {cores}: a harvest VM has more \
                 when nobody else uses it"
            ),
            (false, _, Some(cores)) => usage!(
                "--min-cores {cores} is for harvest VMs; give --cores {cores}: a regular or spot machine always has the same"
            ),
            (true, None, wanted) => ("--min-cores", wanted),
            (false, wanted, None) => ("--cores", wanted),
        };
        if wanted == Some(0) {
            usage!(
                "{option} 0: a machine has 1 at least; leave it out for one that takes no part in the division of cores"
            );
        }
        Ok(wanted.unwrap_or(0))
    }
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let wish = args.wish()?;
    if args.restart {
        return restart::run(&args, &wish.name);
    }
    let program = find_program(&args.command[0])?;
    if wish.container {
        return container::run(&args, &wish, &program);
    }
    // Refuse a wrong command line before other machines give memory for it.
    let memory = match wish.balloon {
        true => Memory::with_balloon(None, wish.bytes, wish.max_bytes),
        false => Memory::plan(&[0], &[wish.bytes], wish.max_bytes),
    };
    edit(&args.command[1..], &memory, Path::new("x"), None)?;
    if wish.balloon {
        check_can_balloon(&program)?;
    } else if wish.max_bytes > wish.bytes {
        check_can_grow(&program)?;
    }
    let admitted = wait_for_memory(args.cluster.need_local_node()?, &wish)?;
    let Admitted { memory, monitor, guest_port } = admitted;
    let arguments = edit(&args.command[1..], &memory, &monitor, guest_port.as_deref())?;
    let error = Command::new(&program).arg0(&args.command[0]).args(arguments).exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}

fn edit(
    arguments: &[OsString],
    memory: &Memory,
    monitor: &Path,
    guest_port: Option<&Path>,
) -> anyhow::Result<Vec<OsString>> {
    match create::edit(arguments, memory, monitor, guest_port) {
        Ok(arguments) => Ok(arguments),
        Err(error) => usage!("this machine cannot be created: {error}"),
    }
}

/// Asks QEMU for its device: without virtio-mem it would end when it is too late.
fn check_can_grow(program: &Path) -> anyhow::Result<()> {
    if !create::can_grow(&device_help(program, GROWING_DRIVER)?) {
        bail!(
            "{} has no {GROWING_DRIVER} (see its `-device {GROWING_DRIVER},help`), by which harvest VMs grow and shrink: take \
             QEMU 5.1 or later for x86-64, or 7.0 for arm64; or give --balloon",
            program.display()
        );
    }
    Ok(())
}

/// In the same way.
fn check_can_balloon(program: &Path) -> anyhow::Result<()> {
    if !create::can_balloon(&device_help(program, BALLOON_DRIVER)?) {
        bail!(
            "{} has no {BALLOON_DRIVER} with free-page reporting (see its `-device {BALLOON_DRIVER},help`), by which a machine \
             with --balloon gives back: take QEMU 6.0 or later",
            program.display()
        );
    }
    Ok(())
}

fn device_help(program: &Path, driver: &str) -> anyhow::Result<String> {
    let device = format!("{driver},help");
    let help = Command::new(program).args(["-device", &device]).stdin(Stdio::null()).output();
    let help = help.with_context(|| format!("cannot start {}", program.display()))?;
    Ok(String::from_utf8_lossy(&help.stdout).into_owned())
}

/// Also over the kill of a node: the next one is asked in its stead, and knows if this machine was
/// admitted.
pub(super) fn wait_for_memory(mut client: NodeClient, wish: &CreateVm) -> anyhow::Result<Admitted> {
    let socket = client.socket().to_owned();
    loop {
        match client.create_vm(wish.clone()) {
            Err(ClientError::Closed | ClientError::Io(_)) => {}
            answered => return Ok(answered?),
        }
        let lost = Instant::now();
        client = loop {
            match NodeClient::connect(&socket) {
                Ok(client) => break client,
                Err(_) if lost.elapsed() < NODE_PATIENCE => thread::sleep(NODE_INTERVAL),
                Err(error) => {
                    return Err(error).with_context(|| {
                        format!("no node answers at {}; is it running?", socket.display())
                    });
                }
            }
        };
    }
}
