# Builds a data frame, aggregates it, and fits a linear model.
set.seed(1)
count <- 1000000
frame <- data.frame(key = sample.int(1000, count, TRUE), x = runif(count), y = rnorm(count))
sums <- aggregate(x ~ key, frame, sum)
model <- lm(y ~ x, frame)
ordered <- frame[order(frame$key, frame$x), ]
cat(nrow(sums), format(sum(sums$x), digits = 10), format(coef(model), digits = 6), ordered$key[500000], "\n")
