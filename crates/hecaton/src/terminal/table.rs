//! Tables for people: columns of text to the left, of numbers to the right.

use std::fmt;

/// Rows of text that are shown with their columns aligned.
pub(crate) struct Table {
    heading: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with one column for each heading; one that begins with `>` is aligned to the right.
    pub(crate) fn new<T: Into<String>>(heading: impl IntoIterator<Item = T>) -> Table {
        Table { heading: heading.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// A table of figures: all columns but the first are aligned to the right.
    pub(crate) fn figures<T: Into<String>>(heading: impl IntoIterator<Item = T>) -> Table {
        let right = |(column, text): (usize, T)| match column {
            0 => text.into(),
            _ => format!(">{}", text.into()),
        };
        Table::new(heading.into_iter().enumerate().map(right))
    }

    /// Adds a row: one cell for each heading.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<_> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.heading.len(), "cells and headings");
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let right: Vec<_> = self.heading.iter().map(|text| text.starts_with('>')).collect();
        let heading = self.heading.iter().map(|text| text.trim_start_matches('>').to_owned());
        let heading: Vec<_> = heading.collect();
        let lines: Vec<&Vec<String>> = std::iter::once(&heading).chain(&self.rows).collect();
        let width = |column: usize| {
            lines.iter().map(|cells| cells[column].chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..heading.len()).map(width).collect();
        for cells in &lines {
            let cells = cells.iter().zip(&widths).zip(&right).map(|((cell, &width), &right)| {
                if right { format!("{cell:>width$}") } else { format!("{cell:width$}") }
            });
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(["NAME", ">FREE"]);
        table.row(["donor-1".into(), "4G".into()]);
        table.row(["ä".into(), "512M".into()]);
        assert_eq!(table.to_string(), "NAME     FREE\ndonor-1    4G\nä        512M\n");
        let mut table = Table::figures(["what", "p50"]);
        table.row(["a fault".into(), "25.0".into()]);
        assert_eq!(table.to_string(), "what      p50\na fault  25.0\n");
    }
}
