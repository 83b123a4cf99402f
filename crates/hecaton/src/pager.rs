//! `hecaton pager`: the process that pages for one consumer. Started by the node, with a socket as
//! its standard input: down it come what the pager is to be and what the pager before it held, up
//! go descriptors to be kept.

use std::process::ExitCode;

/// `hecaton file-keeper`. A pager starts it, with a connection as its standard input.
pub(crate) fn keep_files() -> anyhow::Result<ExitCode> {
    hecaton_pager::keep_files()?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run() -> anyhow::Result<ExitCode> {
    hecaton_pager::run()?;
    Ok(ExitCode::SUCCESS)
}
