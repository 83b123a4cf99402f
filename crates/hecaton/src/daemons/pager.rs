//! `hecaton pager`: the process that pages for one consumer. Started by the node, with a socket as
//! its standard input: down it come what the pager is to be and what the pager before it held, up
//! go descriptors to be kept.

use std::process::ExitCode;

pub(crate) fn run() -> anyhow::Result<ExitCode> {
    hecaton_pager::run()?;
    Ok(ExitCode::SUCCESS)
}
