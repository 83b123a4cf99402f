//! `hecaton man`: manual pages, made from what `--help` says.

use crate::out;
use anyhow::Context as _;
use clap::CommandFactory;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `hecaton man`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Writes a page for each command to this directory; without it, prints the main page
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let command = crate::Cli::command();
    match &args.dir {
        Some(dir) => {
            let wrote =
                fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(command, dir));
            wrote.with_context(|| format!("cannot write to {}", dir.display()))?;
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page)?;
            out::write_bytes(&page);
        }
    }
    Ok(ExitCode::SUCCESS)
}
