//! The `hecaton` command.

// Before all others, whose `println!` is this one's.
#[macro_use]
mod out;

mod bench;
mod cgroup;
mod cluster;
mod daemons;
mod host;
mod listen;
mod nodes;
mod pki;
mod placement;
mod policy;
mod report;
mod run;
mod simulate;
mod status;
mod swap_device;
mod terminal;
mod tls;
mod tools;
mod top;
mod vm;
mod volume;

use clap::{Parser, Subcommand};
use hecaton_node::children::limits;
use std::process::ExitCode;

/// Gives a cluster's idle memory to the programs and virtual machines that need more than their
/// host has.
#[derive(Parser)]
#[command(name = "hecaton", version, propagate_version = true, disable_help_subcommand = true)]
#[command(after_help = "\
Commands find their cluster by --manager URL, else HECATON_MANAGER, else in the directory where \
`hecaton dev` or `hecaton node` left it (--dir).\n\
HECATON_TLS names the directory of certificates for a manager with https (--tls-dir).\n\
HECATON_LOG sets what is logged: error, warn, info, debug, trace, or a filter such as \
hecaton_node=debug.")]
struct Cli {
    /// Logs as JSON, one object a line
    #[arg(long, global = true)]
    log_json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs a whole cluster on this machine, until it is interrupted
    Dev(daemons::dev::Args),
    /// Runs a program, with the memory that does not fit here in the pool
    #[command(after_help = run::access::help())]
    Run(run::Args),
    /// Runs virtual machines, on pool memory or on this host's, and shows those that run
    #[command(subcommand)]
    Vm(vm::Vm),
    /// Shows who has which part of this host's memory
    #[command(subcommand)]
    Host(host::Host),
    /// Runs in a harvest VM: has its applications give memory back before it goes
    Guest(daemons::guest::Args),
    /// Serves pool memory as disks
    #[command(subcommand)]
    Volume(volume::Volume),
    /// Shows what the cluster holds
    Status(status::Args),
    /// Shows the cluster live, in the terminal
    Top(top::Args),
    /// Runs the manager of a real cluster
    Manager(daemons::manager::Args),
    /// Lends this host's memory, and borrows for the programs on it
    Node(Box<daemons::node::Args>),
    /// Says who may hold how much of the pool
    #[command(subcommand)]
    Policy(policy::Policy),
    /// Makes the certificates by which a cluster's parts know each other
    #[command(subcommand)]
    Pki(pki::Pki),
    /// Measures what Hecaton costs, beside something everyone knows
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Simulates clusters on the code that decides in real ones
    #[command(subcommand)]
    Simulate(simulate::Simulate),
    /// Prints the completion script of a shell
    Completion(terminal::completion::Args),
    /// Prints the manual page, or writes those of all commands
    Man(terminal::man::Args),
    /// Serves pages from this process's memory; started by the node
    #[command(hide = true)]
    Donor,
    /// Pages for one consumer; started by the node
    #[command(hide = true)]
    Pager,
    /// Serves one volume; started by the node
    #[command(hide = true)]
    VolumeServer,
    /// Keeps the swap of one program; started by `hecaton run`
    #[command(hide = true)]
    SwapKeeper,
}

impl Command {
    /// Whether it raises its limits, and fails where they are too low all the same.
    fn is_daemon(&self) -> bool {
        use Command::{Dev, Donor, Manager, Node, Pager, VolumeServer};
        matches!(self, Dev(_) | Donor | Manager(_) | Node(_) | Pager | VolumeServer)
    }
}

fn main() -> ExitCode {
    out::while_read(run)
}

fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return terminal::failure::explain_arguments(&error),
    };
    let is_daemon = cli.command.is_daemon();
    let result = terminal::logging::start(cli.log_json).and_then(|()| match cli.command {
        Command::Dev(args) => daemons::dev::run(args, cli.log_json),
        Command::Run(args) => run::run(args),
        Command::Vm(vm) => vm::run(vm),
        Command::Host(host) => host::run(&host),
        Command::Guest(args) => daemons::guest::run(args),
        Command::Volume(volume) => volume::run(volume),
        Command::Status(args) => status::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Manager(args) => daemons::manager::run(&args),
        Command::Node(args) => daemons::node::run(*args, cli.log_json),
        Command::Policy(policy) => policy::run(&policy),
        Command::Pki(pki) => pki::run(&pki),
        Command::Bench(bench) => bench::run(bench).map(|()| ExitCode::SUCCESS),
        Command::Simulate(simulate) => simulate::run(&simulate),
        Command::Completion(args) => terminal::completion::run(&args),
        Command::Man(args) => terminal::man::run(&args),
        Command::Donor => daemons::donor::run(),
        Command::Pager => daemons::pager::run(),
        Command::VolumeServer => daemons::volume_server::run(),
        Command::SwapKeeper => run::swap::keeper::run(),
    });
    result.unwrap_or_else(|error| {
        let error_text = format!("{error:#}");
        let limit = is_daemon.then(|| limits::in_the_way(&error_text)).flatten();
        let limit = limit.map(|limit| format!("; {limit}")).unwrap_or_default();
        eprintln!("hecaton: {error_text}{limit}");
        ExitCode::from(terminal::failure::status(&error))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
