//! Draws a snapshot as figure 9 of the paper does: one point for each page, coloured by its owner.
//! A line of 512 pages is a huge page's size, and a square of 512 lines is 1 GiB.

use crate::bench::program::pages::Owner;
use std::fmt::Write as _;

const LINE: usize = 512;

/// Classes of the report's style: background is what the most pages are of, and is not drawn.
pub(super) const COLOURS: [(Owner, usize, &str); 4] = [
    (Owner::Process, 0, "the application"),
    (Owner::Other, 6, "other programs and the kernel"),
    (Owner::Free, 4, "free"),
    (Owner::Gone, 8, "given to the host"),
];

/// The drawing. Neighbours in a line that are one's are drawn as one.
pub(super) fn draw(pages: &[Owner]) -> String {
    let height = pages.len().div_ceil(LINE);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {LINE} {height}\" role=\"img\" shape-rendering=\"crispEdges\">"
    );
    for (owner, colour, name) in COLOURS {
        let mut points = String::new();
        let (mut x, mut y) = (0, 0);
        for (at, line) in pages.chunks(LINE).enumerate() {
            let mut from = 0;
            for run in line.chunk_by(|a, b| a == b) {
                if run[0] == owner {
                    // By how much it is further on than the last one: that is short.
                    let (right, down) = (from as i64 - x as i64, at - y);
                    let _ = write!(points, "m{right} {down}h{}", run.len());
                    (x, y) = (from + run.len(), at);
                }
                from += run.len();
            }
        }
        if !points.is_empty() {
            let _ = write!(
                svg,
                "<path class=\"l{colour}\" style=\"stroke-width:1\" d=\"M0 .5{points}\"><title>{name}</title></path>"
            );
        }
    }
    svg + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_owners_runs_are_drawn_from_where_the_last_one_ended() {
        let mut pages = vec![Owner::Free; 2 * LINE];
        pages[3] = Owner::Process;
        pages[4] = Owner::Process;
        pages[9] = Owner::Process;
        pages[LINE + 1] = Owner::Process;
        let svg = draw(&pages);
        assert!(svg.contains("viewBox=\"0 0 512 2\""), "{svg}");
        assert!(
            svg.contains("class=\"l0\" style=\"stroke-width:1\" d=\"M0 .5m3 0h2m4 0h1m-9 1h1\""),
            "{svg}"
        );
        // Free pages fill the rest, and no other owner has any.
        assert!(svg.contains("d=\"M0 .5m0 0h3m2 0h4m1 0h502m-512 1h1m1 0h510\""), "{svg}");
        assert_eq!(svg.matches("<path").count(), 2);
    }
}
