//! Plots as SVG: bars, and lines, areas and lanes over time. Colours are classes, so that the
//! page's style decides.
//!
//! They are drawn here rather than by Vega-Lite in the browser, as was planned for reports: the
//! library would be a megabyte in each file, for bars and lines.

use std::fmt::Write as _;

/// Colours that the page's style has (`c0` …).
pub(crate) const COLOURS: usize = 10;

const LEFT: f64 = 52.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
/// Bottom margin of plots over time.
const BOTTOM: f64 = 34.0;
const LANE: f64 = 30.0;

/// Smallest step of an area, in the drawing's unit: half a pixel. It keeps plots of recordings of
/// days small.
const LEAST_STEP: f64 = 0.5;

/// A bar, or several side by side.
pub(crate) struct Group {
    pub(crate) label: String,
    /// One for each colour.
    pub(crate) values: Vec<f64>,
}

/// Values over a common step.
pub(crate) struct Line {
    pub(crate) colour: usize,
    pub(crate) is_dashed: bool,
    pub(crate) name: String,
    /// `None` leaves a gap.
    pub(crate) values: Vec<Option<f64>>,
}

/// One of several that add up.
pub(crate) struct Band {
    pub(crate) colour: usize,
    pub(crate) name: String,
    /// One for each time.
    pub(crate) values: Vec<f64>,
}

/// Something over time that has stages.
pub(crate) struct Lane {
    pub(crate) name: String,
    pub(crate) spans: Vec<Span>,
}

/// A stage, in seconds.
pub(crate) struct Span {
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) colour: usize,
    pub(crate) name: String,
}

/// Groups of bars, with their values on hover. `unit` labels the axis.
pub(crate) fn bars(groups: &[Group], unit: &str, width: f64, height: f64) -> String {
    let bottom = 104.0;
    let most = groups.iter().flat_map(|group| &group.values).copied().fold(0.0, f64::max);
    let frame = Frame::new(width, height, bottom, most);
    let mut svg = frame.open(unit);
    let slot = frame.plot_width() / groups.len().max(1) as f64;
    for (at, group) in groups.iter().enumerate() {
        let bar = slot * 0.8 / group.values.len().max(1) as f64;
        for (colour, &value) in group.values.iter().enumerate() {
            let x = LEFT + slot * (at as f64 + 0.1) + bar * colour as f64;
            let y = frame.y(value);
            let _ = write!(
                svg,
                "<rect class=\"c{}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{bar:.1}\" height=\"{:.1}\">\
                 <title>{}: {value:.1} {unit}</title></rect>",
                colour % COLOURS,
                frame.y(0.0) - y,
                escape(&group.label),
            );
        }
        let (x, y) = (LEFT + slot * (at as f64 + 0.5), frame.y(0.0) + 12.0);
        let _ = write!(
            svg,
            "<text class=\"tick\" text-anchor=\"end\" transform=\"translate({x:.1} {y:.1}) \
             rotate(-35)\">{}</text>",
            escape(&group.label),
        );
    }
    svg + "</svg>"
}

/// Lines over seconds. `most` is the top of the axis, so that plots side by side have one scale.
pub(crate) fn lines(lines: &[Line], unit: &str, most: f64, seconds: usize, width: f64) -> String {
    let frame = Frame::new(width, 210.0, BOTTOM, most);
    let mut svg = frame.open(unit);
    let seconds = seconds as f64;
    frame.time(seconds, &mut svg);
    for line in lines {
        let mut points = String::new();
        let mut is_open = false;
        for (second, value) in line.values.iter().enumerate() {
            if let Some(value) = value {
                let step = if is_open { 'L' } else { 'M' };
                let _ = write!(
                    points,
                    "{step}{:.1} {:.1}",
                    frame.x((second + 1) as f64, seconds),
                    frame.y(*value)
                );
            }
            is_open = value.is_some();
        }
        let _ = write!(
            svg,
            "<path class=\"l{}{}\" d=\"{points}\"><title>{}</title></path>",
            line.colour % COLOURS,
            if line.is_dashed { " dashed" } else { "" },
            escape(&line.name),
        );
    }
    svg + "</svg>"
}

/// Bands on top of each other. Each value lasts until the next of the `times`, in seconds from 0
/// on, which are in order; two that are further apart than `longest_s` have a gap between them.
pub(crate) fn areas(
    bands: &[Band],
    times: &[f64],
    longest_s: f64,
    unit: &str,
    (width, height): (f64, f64),
) -> String {
    let sum = |at: usize| bands.iter().map(|band| band.values[at]).sum::<f64>();
    let most = (0..times.len()).map(sum).fold(0.0, f64::max);
    let frame = Frame::new(width, height, BOTTOM, most);
    let seconds = times.last().copied().unwrap_or(0.0);
    let x = |at: usize| frame.x(times[at], seconds);
    let mut stretches: Vec<Vec<usize>> = Vec::new();
    for at in 0..times.len() {
        match stretches.last_mut() {
            Some(stretch) if times[at] - times[at - 1] <= longest_s => match *stretch.as_slice() {
                [.., before, last] if x(last) - x(before) < LEAST_STEP => {
                    stretch.pop();
                    stretch.push(at);
                }
                _ => stretch.push(at),
            },
            _ => stretches.push(vec![at]),
        }
    }
    let mut svg = frame.open(unit);
    frame.time(seconds, &mut svg);
    let mut below = vec![0.0; times.len()];
    for band in bands {
        let above: Vec<f64> = below.iter().zip(&band.values).map(|(a, b)| a + b).collect();
        let mut points = String::new();
        for stretch in &stretches {
            let (first, last) = (stretch[0], stretch[stretch.len() - 1]);
            let _ = write!(points, "M{:.1} {:.1}", x(first), frame.y(above[first]));
            for &at in &stretch[1..] {
                let _ = write!(points, "H{:.1}V{:.1}", x(at), frame.y(above[at]));
            }
            let _ = write!(points, "V{:.1}", frame.y(below[last]));
            for &at in stretch[..stretch.len() - 1].iter().rev() {
                let _ = write!(points, "V{:.1}H{:.1}", frame.y(below[at]), x(at));
            }
            points.push('Z');
        }
        let (colour, name) = (band.colour % COLOURS, escape(&band.name));
        let _ =
            write!(svg, "<path class=\"c{colour}\" d=\"{points}\"><title>{name}</title></path>");
        below = above;
    }
    svg + "</svg>"
}

/// A lane for each, with its name above.
pub(crate) fn lanes(lanes: &[Lane], seconds: f64, width: f64) -> String {
    let height = TOP + LANE * lanes.len() as f64 + BOTTOM;
    let frame = Frame::new(width, height, BOTTOM, 0.0);
    let mut svg = frame.blank();
    frame.time(seconds, &mut svg);
    for (at, lane) in lanes.iter().enumerate() {
        let y = TOP + LANE * at as f64 + 10.0;
        let begin = lane.spans.first().map_or(LEFT, |span| frame.x(span.from, seconds));
        // Names do not run out of the drawing.
        let (anchor, begin) = match begin > width / 2.0 {
            true => {
                let end = lane.spans.last().map_or(width, |span| frame.x(span.to, seconds));
                ("end", end)
            }
            false => ("start", begin),
        };
        let name = escape(&lane.name);
        let _ = write!(
            svg,
            "<text class=\"tick\" text-anchor=\"{anchor}\" x=\"{begin:.1}\" y=\"{y:.1}\">{name}</text>"
        );
        for span in &lane.spans {
            let (from, to) = (frame.x(span.from, seconds), frame.x(span.to, seconds));
            let _ = write!(
                svg,
                "<rect class=\"c{}\" x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"9\">\
                 <title>{name} {}</title></rect>",
                span.colour % COLOURS,
                y + 4.0,
                (to - from).max(LEAST_STEP),
                escape(&span.name),
            );
        }
    }
    svg + "</svg>"
}

/// Text as HTML and SVG have it.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The drawing area and its vertical axis.
struct Frame {
    width: f64,
    height: f64,
    bottom: f64,
    most: f64,
}

impl Frame {
    fn new(width: f64, height: f64, bottom: f64, most: f64) -> Frame {
        let most = if most > 0.0 { most * 1.05 } else { 1.0 };
        Frame { width, height, bottom, most }
    }

    fn plot_width(&self) -> f64 {
        self.width - LEFT - RIGHT
    }

    fn x(&self, second: f64, seconds: f64) -> f64 {
        LEFT + self.plot_width() * second / if seconds > 0.0 { seconds } else { 1.0 }
    }

    fn y(&self, value: f64) -> f64 {
        let plot = self.height - TOP - self.bottom;
        TOP + plot * (1.0 - (value / self.most).min(1.0))
    }

    fn blank(&self) -> String {
        format!("<svg viewBox=\"0 0 {:.0} {:.0}\" role=\"img\">", self.width, self.height)
    }

    /// With the vertical axis.
    fn open(&self, unit: &str) -> String {
        let mut svg = self.blank();
        for tick in ticks(self.most) {
            let y = self.y(tick);
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{tick:.0}</text>",
                self.width - RIGHT,
                LEFT - 5.0,
                y + 4.0,
            );
        }
        let _ = write!(
            svg,
            "<text class=\"tick\" transform=\"translate(11 {:.1}) rotate(-90)\" \
             text-anchor=\"middle\">{}</text>",
            TOP + (self.height - TOP - self.bottom) / 2.0,
            escape(unit),
        );
        svg
    }

    /// The horizontal axis, of so many seconds.
    fn time(&self, seconds: f64, svg: &mut String) {
        let (unit, unit_s) = match seconds {
            ..=900.0 => ("s", 1.0),
            ..=36000.0 => ("min", 60.0),
            _ => ("h", 3600.0),
        };
        for tick in ticks(seconds / unit_s) {
            let (x, y) = (self.x(tick * unit_s, seconds), self.height - self.bottom + 15.0);
            let _ = write!(
                svg,
                "<text class=\"tick\" text-anchor=\"middle\" x=\"{x:.1}\" y=\"{y:.1}\">{tick:.0} {unit}</text>",
            );
        }
    }
}

/// Four to nine round values from 0 to `most`.
fn ticks(most: f64) -> Vec<f64> {
    let rough = most / 5.0;
    let power = 10f64.powf(rough.max(1e-9).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| step * power >= rough);
    let step = step.unwrap_or(10.0) * power;
    (0..).map(|at| f64::from(at) * step).take_while(|tick| *tick <= most).take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(100.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(ticks(7.0), [0.0, 2.0, 4.0, 6.0]);
        for most in [0.3, 1.0, 9.9, 36.0, 1024.0, 99_999.0] {
            assert!((3..=9).contains(&ticks(most).len()), "{most}: {:?}", ticks(most));
        }
    }

    #[test]
    fn a_gap_starts_a_line_anew_and_names_are_escaped() {
        let values = vec![Some(1.0), Some(2.0), None, Some(3.0)];
        let line = Line { colour: 0, is_dashed: true, name: "a<b".into(), values };
        let svg = lines(&[line], "MiB", 4.0, 4, 300.0);
        assert_eq!(svg.matches('M').count() - "MiB".matches('M').count(), 2);
        assert!(svg.contains("a&lt;b") && svg.contains("l0 dashed"), "{svg}");
    }

    fn band(colour: usize, values: &[f64]) -> Band {
        Band { colour, name: String::new(), values: values.to_vec() }
    }

    #[test]
    fn areas_stand_on_each_other_and_leave_gaps() {
        let bands = [band(0, &[1.0, 1.0, 2.0, 2.0]), band(1, &[3.0, 3.0, 2.0, 0.0])];
        let svg = areas(&bands, &[0.0, 1.0, 2.0, 10.0], 5.0, "MiB", (164.0, 146.0));
        let paths: Vec<_> = svg.split(" d=\"").skip(1).collect();
        let path = |at: usize| paths[at].split('"').next().unwrap();
        // A second is 10 wide; 4 is the top but for 5 %, and the bottom at 112.
        assert_eq!(
            path(0),
            "M52.0 88.2H62.0V88.2H72.0V64.4V112.0V112.0H62.0V112.0H52.0ZM152.0 64.4V112.0Z"
        );
        assert_eq!(
            path(1),
            "M52.0 16.8H62.0V16.8H72.0V16.8V64.4V88.2H62.0V88.2H52.0ZM152.0 64.4V64.4Z"
        );
    }

    #[test]
    fn a_recording_of_a_week_is_drawn_as_fine_as_can_be_seen() {
        let times: Vec<f64> = (0..7 * 24 * 3600).map(f64::from).collect();
        let svg = areas(&[band(0, &times)], &times, 5.0, "MiB", (1000.0, 300.0));
        assert!(svg.len() < 100_000 && svg.contains("150 h"), "{}", svg.len());
    }

    #[test]
    fn lanes_have_their_names_within_the_drawing() {
        let span = |from, to| Span { from, to, colour: 1, name: "runs".into() };
        let lane = |spans| Lane { name: "a".into(), spans };
        let svg = lanes(&[lane(vec![span(0.0, 2.0)]), lane(vec![span(9.0, 10.0)])], 10.0, 164.0);
        for text in ["\"start\" x=\"52.0\"", "\"end\" x=\"152.0\"", "width=\"20.0\"", "a runs"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
    }
}
