# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The text that the means of K are measured on: English prose, written for this.

Other texts give nearly the same means. A change of the text changes the bytes of pages,
so it needs a new ``means.VERSION``.
"""

TEXT = """\
The harbour town lies where a slow river meets the sea, and for most of its history \
the people there have lived by moving things from one to the other. Grain came down \
the river in flat boats; cloth, salt and letters went back up. When the railway \
arrived in 1871, many expected the boats to disappear within a year. They did not. \
The railway carried passengers and mail, but the mills stood on the bank, and a boat \
could be loaded from their doors without a single cart. It took the road, and two \
wars, to empty the quays.

Anna Lindqvist was born in the last house before the lighthouse, the third of five \
children. Her father kept the lamp and wrote down the weather four times a day: the \
pressure of the air, its temperature, the direction of the wind and the height of the \
waves, which he judged by the steps of the landing that they wetted. "You do not need \
to understand a number in order to write it down," he used to say, "but you must \
write it down in order to understand it." The books that he filled are still in the \
library. Sixty years later they turned out to be the longest unbroken record of that \
coast, and Anna was the person who noticed.

She had become a teacher of physics, and she was looking for an exercise that her \
pupils would not find in a textbook. Why, she asked them, do the highest tides not \
come on the day of the full moon, but a day or two after it? They drew curves, added \
them up, and found that the sea behaves like a heavy pendulum that somebody pushes: \
it follows, but it is always late. How late depends on the shape of the bay. With a \
ruler, a table of sines and three weeks of patience, a class of fifteen-year-olds \
could predict the water level at the landing to within the width of a hand. What they \
could not explain was a wave that came twice in their grandfathers' notes, on calm \
days, and each time took the boats from their moorings.

A computer can now do in a second what took them three weeks. The program is short. \
It reads the record, removes the mean, and splits what is left into waves of known \
periods; whatever then remains is either weather or error. Suppose that the record \
has n values. A direct sum needs n times n multiplications, which for a century of \
readings is more than twenty billion. The fast method sorts the values into even and \
odd ones, solves the two halves, and joins them again, so that the work grows only a \
little faster than the record itself. It is worth remembering, however, that the \
method does not know what a tide is. If the clock in the tower was ten minutes slow \
in the winter of 1912, then the tide will seem to have been early, and no formula \
will complain.

Others have since asked for the books. A doctor wanted to know whether cold springs \
bring more coughs; an insurer, how often the water stands above the second step; a \
novelist, what the sky looked like on the night of the great fire. Each of them \
needed something different from the same columns, and each was sent the same \
photographs of the same pages. First they had to learn to read the handwriting. The \
keeper made his sevens with a bar and his ones without a foot, and when he was tired \
he left out the decimal point altogether. Only the sum at the bottom of each page, \
which he never forgot, tells a 1013 from a 101.3.

It would be pleasant to report that the strange wave was found in the end. There are \
three explanations. The first is a landslide under water, some two hundred kilometres \
to the north, where the slope is steep and the mud is deep. The second is a jump in \
air pressure that travels at exactly the speed of a long wave, and builds it up as it \
goes, like a child on a swing. The third is that the keeper was mistaken. Against \
this last one speaks a bill in the archive, dated the following morning: "To Olsen, \
for a rope of forty fathoms and the raising of two boats, eleven crowns." Nobody pays \
eleven crowns for a mistake in a book.

Today the lamp is electric and the house is a museum, open from May to September. \
Visitors may climb the tower, if they are not afraid of the last ladder, and look out \
over the sandbanks. Seals lie there at low water, and in clear weather one can see \
the hills of the other country. On the landing somebody has painted the year beside \
each step that a storm has reached. The highest is 1962; the most recent, to the \
surprise of those who had thought the walls were high enough, is last November. A \
small grey box above it measures the level every second and sends it to an office in \
the capital, where it is stored, compressed, and compared with a forecast. The box \
has no opinion on the moon. But once a year, on the keeper's birthday, the children \
of the school come down with a ruler, kneel on the wet stone, and check whether it is \
right.
"""
