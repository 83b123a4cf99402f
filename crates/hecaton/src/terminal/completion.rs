//! `hecaton completion`: scripts by which shells complete the command line.

use crate::out;
use clap::CommandFactory;
use std::process::ExitCode;

/// Arguments of `hecaton completion`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell
    shell: clap_complete::Shell,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::Cli::command(), "hecaton", &mut script);
    out::write_bytes(&script);
    Ok(ExitCode::SUCCESS)
}
