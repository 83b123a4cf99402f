//! `hecaton vm`: virtual machines, on pool memory or on what their host has unallocated.

mod admit;
mod attach;
mod container;
mod create;
mod detach;
mod libvirt;
mod restart;
mod show;

use crate::cluster::{ClusterArgs, ListArgs};
use crate::placement::RangeArgs;
use crate::run::machine;
use clap::Subcommand;
use hecaton_memory::Size;
use hecaton_node::socket::message::{Place, Wanted};
use std::process::ExitCode;

/// The commands about virtual machines.
#[derive(Subcommand)]
pub(crate) enum Vm {
    /// Runs a virtual machine from its QEMU command line
    #[command(after_help = crate::run::access::help())]
    Run(machine::Args),
    /// Starts a virtual machine on this host's own memory, once there is room for it: a regular one
    /// that always has all of its memory, or a harvest VM that grows and shrinks with what others
    /// leave. With --container, any program
    Create(create::Args),
    /// Waits for a virtual machine that somebody else starts
    Attach(attach::Args),
    /// Lists the virtual machines of this host
    List(ListArgs),
    /// Shows one of them, and where its monitor is
    Status(show::StatusArgs),
    /// Changes how much of a machine's memory stays on this host
    ResizeLocal(ResizeArgs),
    /// Says which donors back a machine's memory from now on, and moves it there while it runs
    Place(PlaceArgs),
    /// Brings a machine's memory home, while it runs on
    Detach(detach::Args),
    /// Sets a libvirt domain up for pool memory, or as a harvest VM, or back
    Libvirt(libvirt::Args),
    /// Prints the script that has libvirt start a domain once this host's agent has room for it:
    /// for /etc/libvirt/hooks/qemu
    LibvirtHook(admit::HookArgs),
    /// Waits until a domain that libvirt is about to start is admitted; run by that script
    Admit(admit::Args),
}

/// Arguments of `hecaton vm resize-local`.
#[derive(clap::Args)]
pub(crate) struct ResizeArgs {
    /// The machine
    name: String,
    /// The memory that stays on this host from now on
    size: Size,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `hecaton vm place`.
#[derive(clap::Args)]
pub(crate) struct PlaceArgs {
    /// The machine
    name: String,
    /// Uses these donors only; without it, all
    #[arg(long, value_name = "DONOR,...", value_delimiter = ',')]
    donors: Vec<String>,
    #[command(flatten)]
    ranges: RangeArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub(crate) fn run(vm: Vm) -> anyhow::Result<ExitCode> {
    match vm {
        Vm::Run(args) => machine::run(args),
        Vm::Create(args) => create::run(args),
        Vm::Attach(args) => attach::run(args),
        Vm::List(args) => show::list(&args),
        Vm::Status(args) => show::status(&args),
        Vm::ResizeLocal(args) => resize(&args),
        Vm::Place(args) => place(args),
        Vm::Detach(args) => detach::run(&args),
        Vm::Libvirt(args) => libvirt::run(&args),
        Vm::LibvirtHook(args) => admit::print_hook(&args),
        Vm::Admit(args) => admit::run(args),
    }
}

fn place(args: PlaceArgs) -> anyhow::Result<ExitCode> {
    let Wanted { donors, ranges, .. } = args.ranges.check(args.donors)?;
    let wish = Place { consumer: args.name, donors, ranges };
    args.cluster.need_local_node()?.place(wish)?;
    Ok(ExitCode::SUCCESS)
}

fn resize(args: &ResizeArgs) -> anyhow::Result<ExitCode> {
    args.cluster.need_local_node()?.resize_local(&args.name, args.size.0)?;
    Ok(ExitCode::SUCCESS)
}
