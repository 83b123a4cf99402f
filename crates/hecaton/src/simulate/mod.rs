//! `hecaton simulate`: clusters without hosts, on the code that decides in real ones.

mod html;
mod policies;
mod results;

use std::process::ExitCode;

/// Simulations.
#[derive(clap::Subcommand)]
pub(crate) enum Simulate {
    /// Memory policies side by side, in the scenarios of the vMCA paper and two more
    Policies(policies::Args),
}

pub(crate) fn run(simulate: &Simulate) -> anyhow::Result<ExitCode> {
    match simulate {
        Simulate::Policies(args) => policies::run(args),
    }
}
