//! `hecaton vm`: virtual machines on pool memory.

mod attach;
mod detach;
mod libvirt;
mod show;

use crate::cluster::ClusterArgs;
use crate::run::machine;
use clap::Subcommand;
use hecaton_memory::Size;
use std::process::ExitCode;

/// The commands about virtual machines.
#[derive(Subcommand)]
pub(crate) enum Vm {
    /// Runs a virtual machine from its QEMU command line
    #[command(after_help = crate::run::access::help())]
    Run(machine::Args),
    /// Waits for a virtual machine that somebody else starts
    Attach(attach::Args),
    /// Lists the virtual machines of this host
    List(show::ListArgs),
    /// Shows one of them, and where its monitor is
    Status(show::StatusArgs),
    /// Changes how much of a machine's memory stays on this host
    ResizeLocal(ResizeArgs),
    /// Brings a machine's memory home, while it runs on
    Detach(detach::Args),
    /// Sets a libvirt domain up for pool memory, or back
    Libvirt(libvirt::Args),
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

pub(crate) fn run(vm: Vm) -> anyhow::Result<ExitCode> {
    match vm {
        Vm::Run(args) => machine::run(args),
        Vm::Attach(args) => attach::run(args),
        Vm::List(args) => show::list(&args),
        Vm::Status(args) => show::status(&args),
        Vm::ResizeLocal(args) => resize(&args),
        Vm::Detach(args) => detach::run(&args),
        Vm::Libvirt(args) => libvirt::run(&args),
    }
}

fn resize(args: &ResizeArgs) -> anyhow::Result<ExitCode> {
    args.cluster.need_local_node()?.resize_local(&args.name, args.size.0)?;
    Ok(ExitCode::SUCCESS)
}
